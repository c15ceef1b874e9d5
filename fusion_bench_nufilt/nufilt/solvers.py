"""How the adapter is found: by the paper's steps of Adam, or in closed form."""

from functools import partial

import torch
from torch import Tensor

from .adapter import Objective, Solver, fit_adapter
from .options import FusionConfig


def solve_adapter(
    objective: Objective, A: Tensor, *, ridge: float, float64: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Minimise :math:`L(A, B) + \lambda \|A\|^2` over A, with B fixed: a small linear
    system instead of Adam's steps.

    B is an orthonormal basis of the rows of the initial :math:`A G`, a sketch of the
    directions in which :math:`\tau` is large, with
    :math:`B^\top G B = \operatorname{diag}(g)`. With :math:`V^\top V = W s W^\top` the
    minimiser is :math:`A = [(B^\top H W) / (g s^\top + \lambda)]\, W^\top V^\top`. This
    is not in the paper; the ridge acts as stopping Adam early does, and is given as
    :math:`\lambda` over the mean eigenvalue :math:`\|\tau\|_F^2 / d_i` of G. With
    ``float64``, matrices are decomposed in float64.

    Returns:
        As :func:`fit_adapter`; the losses ``(n, 2)`` are those before and after,
        without the ridge.
    """
    tau = objective.tau
    V = objective.V
    H = objective.H

    def gram(X: Tensor) -> Tensor:
        return tau.mT @ (tau @ X) if objective.gram is None else objective.gram @ X

    def wide(X: Tensor) -> Tensor:
        return X.double() if float64 else X

    Q = torch.linalg.qr(wide(gram(A.mT))).Q.to(A)
    g, F = (each.to(A) for each in torch.linalg.eigh(wide(Q.mT @ gram(Q))))
    B = Q @ F
    s, W = (each.to(A) for each in torch.linalg.eigh(wide(V.mT @ V)))
    penalty = ridge * tau.square().sum(dim=(-2, -1), keepdim=True) / tau.shape[-1]
    # In the coordinates where the system is diagonal:
    target = B.mT @ H @ W[..., : H.shape[-1], :]
    penalty = penalty.clamp_min(torch.finfo(A.dtype).tiny)
    D = target / (g[..., None] * s[..., None, :] + penalty)
    reached = D * s[..., None, :]  # A V = reached W^T
    gain = (reached * (2 * target - g[..., None] * reached)).sum(dim=(-2, -1))
    loss_before = objective.target_norm2
    losses = torch.stack([loss_before, loss_before - gain], dim=-1)
    return D @ (V @ W).mT, B, losses


def solver_of(config: FusionConfig, *, float64: bool = False) -> Solver:
    """Return what finds the adapters; with ``float64``, it decomposes in float64."""
    if config.solver == "closed_form":
        return partial(solve_adapter, ridge=config.ridge, float64=float64)
    return partial(fit_adapter, lr=config.lr, max_steps=config.max_steps)
