r"""Subspace affinity of the tasks' data and their task vectors (paper, Section 3.4).

It is :math:`A = \|\hat V^\top V_d\|_F^2 / r_d`, the mean squared cosine of the principal angles, for the r_d directions
V_d of a task's data and the r_v >= r_d directions of a task vector. By chance it is r_v over d_i.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusion_bench_nufilt.core.subspace import top_eigenvectors

Floats = NDArray[np.float64]


def data_subspace(C: Tensor, rank: int) -> Tensor:
    """Return V_d, the eigenvectors ``(..., d_i, r_d)`` of a second moment, that of the largest eigenvalue first.

    Columns beyond the rank of C are zero: fewer inputs than ``rank`` cannot span that many directions.
    """
    V = top_eigenvectors(C, min(rank, C.shape[-1]))
    energy = ((C @ V) * V).sum(dim=-2)
    cutoff = C.shape[-1] * torch.finfo(C.dtype).eps * energy.amax(dim=-1, keepdim=True)
    return V * (energy > cutoff)[..., None, :]


def affinity_by_rank(V_d: Tensor, V_hat: Tensor, ranks: Sequence[int]) -> Tensor:
    """Return A for r_d = r_v = r, ``(..., len(ranks))``; the most important column comes first in both bases."""
    squares = (V_hat.mT @ V_d).square()
    return torch.stack([squares[..., :r, :r].sum(dim=(-2, -1)) / r for r in ranks], dim=-1)


def dominance(A: Floats) -> dict[str, float]:
    """Say how far matched affinities stand above mismatched ones.

    Args:
        A: ``(layers, T, T)``, rows are data, columns vectors; T > 1.

    Returns:
        ``diagonal`` and ``off_diagonal``, means over tasks and layers, and their ``ratio``; how many ``rows`` and
        ``columns`` of the mean matrix have their largest value on the diagonal; and ``matched_above``, how often
        matched is above mismatched in the same row or column of a layer.
    """
    count = A.shape[-1]
    own = np.diagonal(A, axis1=1, axis2=2)  # (layers, T)
    other = ~np.eye(count, dtype=bool)
    M = A.mean(axis=0)
    above = np.stack([own[:, :, None] > A, own[:, None, :] > A])
    matched, mismatched = float(own.mean()), float(A[:, other].mean())
    return {
        "diagonal": matched,
        "off_diagonal": mismatched,
        "rows": int((M.argmax(axis=1) == np.arange(count)).sum()),
        "columns": int((M.argmax(axis=0) == np.arange(count)).sum()),
        "matched_above": float(above[..., other].mean()),
        "ratio": matched / mismatched if mismatched else float("inf"),
    }


def example_pairs(M: Floats) -> list[tuple[int, int]]:
    """Choose a high, a moderate and a low pair (data, vector), whose distributions are drawn.

    They are the largest diagonal entry of the mean matrix, the off-diagonal entry at their 90th percentile, and the
    smallest one.
    """
    best = int(np.diagonal(M).argmax())
    off = sorted((float(M[i, j]), i, j) for i in range(len(M)) for j in range(len(M)) if i != j)
    return [(best, best), *(off[rank][1:] for rank in (round(0.9 * (len(off) - 1)), 0) if off)]
