r"""Subspaces of task vectors and of the tasks' data: energy by direction, overlap, and affinity
(paper, Section 3.4).

The affinity :math:`A = \|\hat V^\top V_d\|_F^2 / r_d` is the mean squared cosine of the principal
angles, for the r_d directions V_d of a task's data and the r_v >= r_d directions of a task vector.
Its chance level is r_v / d_i.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusion_bench_nufilt.nufilt.bases import leading_directions, top_eigenvectors
from fusion_bench_nufilt.nufilt.eigenvectors import gram_matrix
from fusion_bench_nufilt.nufilt.subspace import subspace_affinity

Floats = NDArray[np.float64]

#: Matrices with a side up to this are solved by their Gram matrix.
_LARGEST_GRAM = 1024
#: Of the subspace iteration for larger ones: its rounds, and the directions beyond those wanted.
_ROUNDS = 4
_OVERSAMPLING = 16


@dataclass(frozen=True)
class VectorSummary:
    """A task vector of one layer, by its leading directions."""

    #: Its top right singular vectors, ``(d_i, r)``, the most important first; zero beyond the
    #: numerical rank.
    V: Tensor
    norm: float  # Frobenius norm
    energy: Tensor  # the share of the squared norm in each of the directions of V, (r,)
    rank: int | None  # the numerical rank; None if more directions than were computed
    #: The squared norm over the largest squared singular value (stable rank); 0 for a zero vector.
    effective_rank: float

    def directions(self, most: int) -> int:
        """Return how many of the first directions are not zero."""
        return int((self.energy[:most] > 0).sum())

    def rank_for(self, share: float) -> int | None:
        """Return how many directions hold this share of the energy, or None if more than were
        computed.
        """
        # Each direction's share is rounded once.
        rounding = len(self.energy) * torch.finfo(self.energy.dtype).eps
        reached = self.energy.double().cumsum(0) >= share - rounding
        if not reached.any():
            return None
        return int(reached.nonzero()[0]) + 1


def task_vector(tau: Tensor, rank: int) -> VectorSummary:
    """Summarise a task vector ``(d_o, d_i)`` by its top ``rank`` directions."""
    d_o, d_i = tau.shape
    V, sigma = _top_directions(tau, min(rank, d_o, d_i))
    # Beyond the numerical rank, singular values are rounding errors.
    cutoff = max(d_o, d_i) * torch.finfo(tau.dtype).eps * sigma.amax()
    sigma = sigma * (sigma > cutoff)
    norm = float(torch.linalg.vector_norm(tau))
    if norm == 0:
        return VectorSummary(torch.zeros_like(V), 0.0, torch.zeros_like(sigma), 0, 0.0)
    numerical_rank: int | None = int((sigma > 0).sum())
    if numerical_rank == len(sigma) < min(d_o, d_i):  # there may be more
        numerical_rank = None
    energy = sigma.square() / norm**2
    effective_rank = norm**2 / float(sigma.amax()) ** 2
    return VectorSummary(V * (sigma > 0), norm, energy, numerical_rank, effective_rank)


def _top_directions(tau: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the top right singular vectors ``(d_i, rank)`` and the singular values, the largest
    first.

    If both sides are above 1024, the Gram matrix would take most of the time, and a few rounds on
    the matrix itself are exact enough, see :func:`leading_directions`: singular values of task
    vectors fall faster than k^-0.4.
    """
    d_o, d_i = tau.shape
    if min(d_o, d_i) > _LARGEST_GRAM:
        _, V = leading_directions(tau, rank, _OVERSAMPLING, _ROUNDS)
    elif d_i <= d_o:
        V = top_eigenvectors(gram_matrix(tau), rank)
    else:
        # The smaller Gram matrix is that of the rows; tau^T takes their directions to columns'.
        U = top_eigenvectors(gram_matrix(tau.mT), rank)
        # Where singular values are small, rounding leaves these columns not quite orthogonal.
        V = torch.linalg.qr(tau.mT @ U).Q
    return V, torch.linalg.vector_norm(tau @ V, dim=0)


def overlap(a: VectorSummary, b: VectorSummary, rank: int) -> float:
    """Return the mean squared cosine of the principal angles between the top ``rank`` directions of
    two task vectors.

    It is 1 if they use the same input directions, so that merging one disturbs the other; by
    chance, rank / d_i.
    """
    V = a.V[:, :rank]
    W = b.V[:, :rank]
    # The squares of a basis sum up to its number of directions; the affinity is of the narrower
    # subspace to the wider one.
    narrow, wide = sorted((V, W), key=lambda basis: int(basis.square().sum().round()))
    return float(subspace_affinity(narrow, wide))


def data_subspace(C: Tensor, rank: int) -> Tensor:
    """Return V_d, the top eigenvectors ``(..., d_i, r_d)`` of a second moment, the largest
    eigenvalue first.

    Columns beyond the rank of C are zero.
    """
    V = top_eigenvectors(C, min(rank, C.shape[-1]))
    energy = ((C @ V) * V).sum(dim=-2)
    cutoff = C.shape[-1] * torch.finfo(C.dtype).eps * energy.amax(dim=-1, keepdim=True)
    return V * (energy > cutoff)[..., None, :]


def affinity_by_rank(V_d: Tensor, V_hat: Tensor, ranks: Sequence[int]) -> Tensor:
    """Return A for r_d = r_v = r, ``(..., len(ranks))``; the most important column comes first in
    both bases.
    """
    affinities = [subspace_affinity(V_d[..., :r], V_hat[..., :r]) for r in ranks]
    return torch.stack(affinities, dim=-1)


def dominance(A: Floats) -> dict[str, float]:
    """Compare matched with mismatched affinities; A is ``(layers, T, T)``, by data and vector, with
    T > 1.

    ``rows`` and ``columns`` count those of the mean matrix whose largest value is on the diagonal;
    ``matched_above`` is the share of comparisons within a layer's row or column that the matched
    affinity wins.
    """
    count = A.shape[-1]
    matched = np.diagonal(A, axis1=1, axis2=2)  # (layers, T)
    is_mismatched = ~np.eye(count, dtype=bool)
    wins_in_row = matched[:, :, None] > A
    wins_in_column = matched[:, None, :] > A
    wins = np.stack([wins_in_row, wins_in_column])[..., is_mismatched]
    diagonal = float(matched.mean())
    off_diagonal = float(A[:, is_mismatched].mean())
    M = A.mean(axis=0)
    leads_row = M.argmax(axis=1) == np.arange(count)
    leads_column = M.argmax(axis=0) == np.arange(count)
    return {
        "diagonal": diagonal,
        "off_diagonal": off_diagonal,
        "rows": int(leads_row.sum()),
        "columns": int(leads_column.sum()),
        "matched_above": float(wins.mean()),
        "ratio": diagonal / off_diagonal if off_diagonal else math.inf,
    }
