"""The null-space projector P = I - V_p V_p^T of what is already merged (Section 4.1).

The columns of V_p are the top r_p right singular vectors of the cumulative update: the input directions in which the
merged model already differs from the pretrained one.
"""

from typing import Literal

import torch
from torch import Tensor


def project(tau: Tensor, V_p: Tensor, null_space: bool | Literal["zero"]) -> Tensor:
    r"""Return :math:`\tau P` for the P that ``FusionConfig.null_space`` names; ``tau`` itself where P = I."""
    if null_space is False:
        return tau
    return torch.zeros_like(tau) if null_space == "zero" else null_space_filter(tau, V_p)


def null_space_filter(tau: Tensor, V_p: Tensor) -> Tensor:
    r"""Return :math:`\tau P = \tau - (\tau V_p) V_p^\top`, ``(..., d_o, d_i)``; P itself is never formed."""
    return tau - (tau @ V_p) @ V_p.mT


def first_coordinates(tau: Tensor, rank: int) -> Tensor:
    r"""Return the V_p ``(..., d_i, r)`` of the authors' released run at the first task: the first input coordinates.

    Its :math:`\tilde\tau` is zero there, and the "top singular vectors" of a zero matrix come out as unit vectors.
    ``tau`` is ``(..., d_o, d_i)``, and the rank is clipped to ``min(d_o, d_i)``.
    """
    d_o, d_i = tau.shape[-2:]
    unit = torch.eye(d_i, min(rank, d_o, d_i), dtype=tau.dtype, device=tau.device)
    return unit.expand(*tau.shape[:-2], -1, -1)
