"""The null-space projector P = I - V_p V_p^T of what is already merged (Section 4.1)."""

import torch
from torch import Tensor

from .subspace import top_right_singular_vectors


def protected_subspace(tau_merged: Tensor, rank: int, *, exact_on: torch.device | None = None) -> Tensor:
    r"""Basis V_p of the input directions in which the merged model already differs from the pretrained one.

    Args:
        tau_merged: cumulative updates :math:`\tilde\tau`, ``(..., d_o, d_i)``.
        rank: r_p; clipped to ``min(d_o, d_i)`` and to the numerical rank: a zero update protects nothing.
        exact_on: compute in float64 on this device.

    Returns:
        ``(..., d_i, r)`` with orthonormal or zero columns.

    Raises:
        torch.linalg.LinAlgError: as :func:`~fusion_bench_nufilt.core.subspace.top_right_singular_vectors`.
    """
    return top_right_singular_vectors(tau_merged, rank, exact_on=exact_on)


def first_coordinates(tau: Tensor, rank: int) -> Tensor:
    r"""What the authors' released run protects at the first task: the first input coordinates.

    Its :math:`\tilde\tau` is zero there, and the "top singular vectors" of a zero matrix come out as unit
    vectors. Shapes as in :func:`protected_subspace`.
    """
    d_o, d_i = tau.shape[-2:]
    unit = torch.eye(d_i, min(rank, d_o, d_i), dtype=tau.dtype, device=tau.device)
    return unit.expand(*tau.shape[:-2], -1, -1)


def null_space_filter(tau: Tensor, V_p: Tensor) -> Tensor:
    r"""Filtered task vector :math:`\tau P = \tau - (\tau V_p) V_p^\top`, ``(..., d_o, d_i)``; P is never formed."""
    return tau - (tau @ V_p) @ V_p.mT
