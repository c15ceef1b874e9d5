r"""The second moments of a layer's inputs, which stand for the data in everything that an analysis measures.

With :math:`C = \frac1N \sum_n x_n x_n^\top`, not centred, :math:`E\|D x\|^2 = \operatorname{tr}(D C D^\top)` for any
matrix D: once C is recorded, no data is needed any more.
"""

import torch
from torch import Tensor

from fusion_bench_nufilt.core.subspace import gram_matrix, top_eigenvectors


def second_moment(X: Tensor) -> Tensor:
    r"""Return :math:`C = X^\top X / N`, ``(d_i, d_i)``, of inputs ``(N, d_i)``, one in each row."""
    return gram_matrix(X) / len(X)


def mean_square(D: Tensor, C: Tensor) -> Tensor:
    r"""Return :math:`E\|D x\|^2 = \operatorname{tr}(D C D^\top)`, ``(...)``.

    Args:
        D: ``(..., d_o, d_i)``.
        C: ``(..., d_i, d_i)``.
    """
    return ((D @ C) * D).sum(dim=(-2, -1)).clamp_min(0)  # below 0 is rounding


def data_subspace(C: Tensor, rank: int) -> Tensor:
    """Return V_d, the eigenvectors ``(..., d_i, r_d)`` of the largest eigenvalues of C, the largest first.

    Columns beyond the rank of C are zero: fewer inputs than ``rank`` cannot span that many directions.
    """
    V = top_eigenvectors(C, min(rank, C.shape[-1]))
    energy = ((C @ V) * V).sum(dim=-2)
    cutoff = C.shape[-1] * torch.finfo(C.dtype).eps * energy.amax(dim=-1, keepdim=True)
    return V * (energy > cutoff)[..., None, :]
