r"""The LoRA adapter BA that gives back what the filter took from the new task (Sections
4.1 and 4.2).

For one layer and :math:`V = [V_t, V_p]`, the data-free objective is

.. math::
    L(A, B) = \|T - \tau B A V\|_F^2, \qquad
    T = [\,\tau V_t - (\tilde\tau + \tau P) V_t, \; -\tau P V_p\,]

whose first columns ask for plasticity and whose last ones for stability. With
:math:`G = \tau^\top\tau`, :math:`H = \tau^\top T` and :math:`Y = AV` its gradients are

.. math::
    \nabla_B L = 2\,(G B\, Y Y^\top - H Y^\top), \qquad
    \nabla_A L = 2\,(B^\top G B\, Y - B^\top H)\, V^\top

so that with G, nothing in the loop has height d_o. Where :math:`\tau = Q K` with few
orthonormal columns Q (a LoRA), K takes the place of :math:`\tau`, :math:`Q^\top T`
takes that of T, and the part of T outside Q is a constant of the loss. The last columns
of T, and so of H, vanish unless P = I, since :math:`P V_p = 0`; they are then not
stored.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .eigenvectors import gram_matrix

Solver = Callable[["Objective", Tensor], tuple[Tensor, Tensor, Tensor]]
"""Finds an adapter for an objective from an initial A, as :func:`fit_adapter` does."""


def loop_gram(tau: Tensor) -> Tensor | None:
    r"""Return :math:`G = \tau^\top\tau`, or None where :math:`\tau^\top (\tau B)` costs
    less than :math:`G B`.
    """
    d_o, d_i = tau.shape[-2:]
    return gram_matrix(tau) if d_i <= 2 * d_o else None


@dataclass(frozen=True)
class Objective:
    """The data-free objective of a stack of n layers of equal shape, reduced to what
    its gradients need.
    """

    tau: Tensor  # (n, d_o, d_i), or (n, r, d_i) in a basis of r outputs
    gram: Tensor | None  # (n, d_i, d_i), see loop_gram
    V: Tensor  # (n, d_i, k): the columns of [V_t, V_p]
    H: Tensor  # (n, d_i, h): the first h columns of tau^T T; the others are zero
    target_norm2: Tensor  # (n,): ||T||_F^2, the loss where BA = 0

    @classmethod
    def build(
        cls,
        tau: Tensor,  # (n, d_o, d_i), or K of tau = Q K
        tau_filtered: Tensor,  # tau P, or K P; tau itself where P = I
        tau_merged: Tensor,  # the cumulative updates, (n, d_o, d_i)
        V_t: Tensor,  # the task subspaces, (n, d_i, r_v)
        V_p: Tensor,  # the protected subspaces, (n, d_i, r_p)
        gram: Tensor | None = None,  # loop_gram(tau), if it is at hand already
        Q: Tensor | None = None,  # (n, d_o, r)
    ) -> "Objective":
        T = -(tau_merged @ V_t)
        outside: Tensor | float = 0.0
        if Q is not None:
            inside = Q.mT @ T
            outside = (T - Q @ inside).square().sum(dim=(-2, -1))
            T = inside
        if tau_filtered is tau:
            T = torch.cat([T, -(tau @ V_p)], dim=-1)
        else:
            T += tau @ V_t - tau_filtered @ V_t
        gram = loop_gram(tau) if gram is None else gram
        target_norm2 = T.square().sum(dim=(-2, -1)) + outside
        return cls(tau, gram, torch.cat([V_t, V_p], dim=-1), tau.mT @ T, target_norm2)


def fit_adapter(
    objective: Objective, A: Tensor, *, lr: float, max_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Minimise the objective by full-batch Adam from A ``(n, r_l, d_i)``, which is not
    changed, and B = 0.

    Fifty steps do not converge, and stopping there restrains forgetting. Each step
    costs d_i^2 r_l multiplications and writes into the same buffers.

    Returns:
        A ``(n, r_l, d_i)``, B ``(n, d_i, r_l)`` and the losses ``(n, max_steps + 1)``
        before each update and after the last one.
    """
    tau = objective.tau
    gram = objective.gram
    V = objective.V
    H = objective.H
    n, r_l, d_i = A.shape
    k = V.shape[-1]
    h = H.shape[-1]
    # One product gives G B and H^T B.
    GH = None if gram is None else torch.cat([gram, H.mT], dim=-2)

    A = A.clone()
    B = A.new_zeros(n, d_i, r_l)
    A.grad = torch.empty_like(A)
    B.grad = torch.empty_like(B)
    adam = torch.optim.Adam([A, B], lr=lr, fused=True)
    Y = A.new_empty(n, r_l, k)
    E = A.new_empty(n, r_l, k)
    YYt = A.new_empty(n, r_l, r_l)
    BtGB = A.new_empty(n, r_l, r_l)
    products = A.new_empty(n, d_i + h, r_l)
    GB = products[:, :d_i]
    HtB = products[:, d_i:]
    losses = A.new_empty(n, max_steps + 1)
    for step in range(max_steps + 1):
        if GH is not None:
            torch.bmm(GH, B, out=products)
        else:
            torch.bmm(tau.mT, tau @ B, out=GB)
            torch.bmm(H.mT, B, out=HtB)
        torch.bmm(A, V, out=Y)
        torch.bmm(Y, Y.mT, out=YYt)
        torch.bmm(B.mT, GB, out=BtGB)
        # ||T||^2 - 2 <T, tau B Y> + ||tau B Y||^2
        cross = (HtB.mT * Y[..., :h]).sum(dim=(-2, -1))
        square = (BtGB * YYt).sum(dim=(-2, -1))
        losses[:, step] = objective.target_norm2 - 2 * cross + square
        if step == max_steps:
            break
        torch.bmm(GB, YYt, out=B.grad)
        B.grad.baddbmm_(H, Y[..., :h].mT, beta=2, alpha=-2)
        torch.bmm(BtGB, Y, out=E)
        E[..., :h] -= HtB.mT
        torch.baddbmm(A.grad, E, V.mT, beta=0, alpha=2, out=A.grad)
        adam.step()
    return A, B, losses
