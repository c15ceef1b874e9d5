"""Subspace affinity of the tasks' data and their task vectors (paper, Section 3.4)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusion_bench_nufilt.core.subspace import subspace_affinity

Floats = NDArray[np.float64]


def affinity(V_d: Tensor, V_hat: Tensor) -> Tensor:
    r"""Return :math:`A = \|\hat V^\top V_d\|_F^2 / r_d`, the mean squared cosine of the principal angles.

    Args:
        V_d: top eigenvectors of the data's second moment, ``(..., d_i, r_d)``.
        V_hat: top right singular vectors of a task vector, ``(..., d_i, r_v)``.

    Raises:
        ValueError: r_d > r_v, where A could not reach 1.
    """
    if V_d.shape[-1] > V_hat.shape[-1]:
        raise ValueError(f"r_d must not exceed r_v, got r_d = {V_d.shape[-1]} and r_v = {V_hat.shape[-1]}")
    return subspace_affinity(V_d, V_hat)


def affinity_by_rank(V_d: Tensor, V_hat: Tensor, ranks: Sequence[int]) -> Tensor:
    """Return A for r_d = r_v = r, ``(..., len(ranks))``; the most important column comes first in both bases."""
    squares = (V_hat.mT @ V_d).square()
    return torch.stack([squares[..., :r, :r].sum(dim=(-2, -1)) / r for r in ranks], dim=-1)


def chance(rank: int, width: int) -> float:
    """Return the mean of A for a random subspace of dimension r_v in d_i dimensions, which does not depend on r_d."""
    return min(rank, width) / width


@dataclass(frozen=True)
class Dominance:
    """How far matched pairs stand above mismatched ones."""

    diagonal: float  # mean over tasks and layers
    off_diagonal: float
    rows: int  # how many rows of the mean matrix have their largest value on the diagonal
    columns: int
    matched_above: float  # P(matched > mismatched in the same row or column) over layers

    @property
    def ratio(self) -> float:
        return self.diagonal / self.off_diagonal if self.off_diagonal else float("inf")


def dominance(A: Floats) -> Dominance:
    """Compare matched and mismatched affinities ``(layers, T, T)``: rows are data, columns vectors; T > 1."""
    count = A.shape[-1]
    own = np.diagonal(A, axis1=1, axis2=2)  # (layers, T)
    other = ~np.eye(count, dtype=bool)
    M = A.mean(axis=0)
    above = np.stack([own[:, :, None] > A, own[:, None, :] > A])
    return Dominance(
        diagonal=float(own.mean()),
        off_diagonal=float(A[:, other].mean()),
        rows=int((M.argmax(axis=1) == np.arange(count)).sum()),
        columns=int((M.argmax(axis=0) == np.arange(count)).sum()),
        matched_above=float(above[..., other].mean()),
    )


def example_pairs(M: Floats) -> list[tuple[int, int]]:
    """Choose a high, a moderate and a low pair (data, vector), whose distributions are drawn.

    They are the largest diagonal entry of the mean matrix, the off-diagonal entry at their 90th percentile, and the
    smallest one.
    """
    best = int(np.diagonal(M).argmax())
    off = sorted((float(M[i, j]), i, j) for i in range(len(M)) for j in range(len(M)) if i != j)
    return [(best, best), *(off[rank][1:] for rank in (round(0.9 * (len(off) - 1)), 0) if off)]
