r"""The LoRA adapter BA that gives back what the filter took from the new task (Section 3.3).

For one layer, with :math:`V = [V_t, V_p]`, the data-free objective is

.. math::
    L(A, B) = \|T - \tau B A V\|_F^2, \qquad
    T = [\,\tau V_t - (\tilde\tau + \tau P) V_t, \; -\tau P V_p\,]

plasticity in the first columns, stability in the last. With :math:`G = \tau^\top\tau`,
:math:`H = \tau^\top T` and :math:`Y = AV` its gradients are

.. math::
    \nabla_B L = 2\,(G B\, Y Y^\top - H Y^\top), \qquad
    \nabla_A L = 2\,(B^\top G B\, Y - B^\top H)\, V^\top

so nothing of height d_o is left in the loop. The last columns of T, and so of H, vanish unless P = I
(:math:`P V_p = 0`); they are then not stored.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Objective:
    """The data-free objective of a stack of n layers of equal shape, reduced to what its gradients need."""

    tau: Tensor  # (n, d_o, d_i)
    V: Tensor  # (n, d_i, k): the columns of [V_t, V_p]
    H: Tensor  # (n, d_i, h): the columns of tau^T T that need not be zero, the first h of k
    target_norm2: Tensor  # (n,): ||T||_F^2, the loss where BA = 0

    @classmethod
    def build(cls, tau: Tensor, tau_filtered: Tensor, tau_merged: Tensor, V_t: Tensor, V_p: Tensor) -> "Objective":
        r"""Reduce the objective.

        Args:
            tau: task vectors, ``(n, d_o, d_i)``.
            tau_filtered: :math:`\tau P`, like ``tau``; ``tau`` itself where P = I.
            tau_merged: cumulative updates :math:`\tilde\tau`, like ``tau``.
            V_t: task subspaces, ``(n, d_i, r_v)``.
            V_p: protected subspaces, ``(n, d_i, r_p)``.
        """
        T = -(tau_merged @ V_t)
        if tau_filtered is tau:
            T = torch.cat([T, -(tau @ V_p)], dim=-1)
        else:
            T += (tau - tau_filtered) @ V_t
        return cls(tau, torch.cat([V_t, V_p], dim=-1), tau.mT @ T, T.square().sum(dim=(-2, -1)))


def fit_adapter(objective: Objective, A: Tensor, *, lr: float, max_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Minimise the objective by full-batch Adam from (A, B = 0) for a fixed number of steps.

    Fifty steps do not converge: stopping early is part of the method.

    Args:
        objective: of n layers.
        A: initial ``(n, r_l, d_i)``; not changed.
        lr: learning rate of Adam (betas 0.9 and 0.999, eps 1e-8).
        max_steps: number of updates.

    Returns:
        A ``(n, r_l, d_i)``, B ``(n, d_i, r_l)`` and the losses ``(n, max_steps + 1)`` before each update
        and after the last.
    """
    tau, V, H = objective.tau, objective.V, objective.H
    d_o, d_i = tau.shape[-2:]
    h = H.shape[-1]
    # G B costs d_i^2 r_l once G is known, tau^T (tau B) costs 2 d_o d_i r_l.
    G = tau.mT @ tau if d_i <= 2 * d_o else None

    A = A.clone()
    B = A.new_zeros(A.shape[0], d_i, A.shape[1])
    A.grad, B.grad = torch.empty_like(A), torch.empty_like(B)
    adam = torch.optim.Adam([A, B], lr=lr, fused=True)
    losses = []
    for step in range(max_steps + 1):
        Y = A @ V
        GB = tau.mT @ (tau @ B) if G is None else G @ B
        YYt, BtGB, BtH = Y @ Y.mT, B.mT @ GB, B.mT @ H
        fitted = (BtGB * YYt).sum(dim=(-2, -1)) - 2 * (BtH * Y[..., :h]).sum(dim=(-2, -1))
        losses.append(objective.target_norm2 + fitted)
        if step == max_steps:
            break
        torch.baddbmm(GB @ YYt, H, Y[..., :h].mT, beta=2, alpha=-2, out=B.grad)
        E = BtGB @ Y
        E[..., :h] -= BtH
        torch.bmm(E.mul_(2), V.mT, out=A.grad)
        adam.step()
    return A, B, torch.stack(losses, dim=-1)
