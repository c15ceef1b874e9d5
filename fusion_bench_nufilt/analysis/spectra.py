"""What task vectors tell by themselves, without data: their energy by direction, and where they collide."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion_bench_nufilt.core.subspace import gram_matrix, subspace_affinity, top_eigenvectors


@dataclass(frozen=True)
class TaskVector:
    """What is kept of a layer's task vector.

    Args:
        V: its top right singular vectors, ``(d_i, r)``, the most important first; zero beyond the numerical rank.
        norm: its Frobenius norm.
        energy: share of its squared norm in each of the directions of ``V``, ``(r,)``.
        effective_rank: squared norm over the largest squared singular value (stable rank), at least 1.
    """

    V: Tensor
    norm: float
    energy: Tensor
    effective_rank: float

    @property
    def numerical_rank(self) -> int:
        """How many of the directions it has: less than asked for in a task that was trained with a small LoRA."""
        return int((self.energy > 0).sum())

    def rank_for(self, share: float) -> int | None:
        """How many directions hold this share of the energy; None: more than were looked at."""
        reached = self.energy.cumsum(0) >= share - 1e-6
        return int(reached.nonzero()[0]) + 1 if reached.any() else None


def task_vector(tau: Tensor, rank: int) -> TaskVector:
    """Look at a task vector ``(d_o, d_i)``; only its top ``rank`` directions are solved for."""
    d_o, d_i = tau.shape
    norm = float(torch.linalg.vector_norm(tau))
    tall = tau if d_i <= d_o else tau.mT
    U = top_eigenvectors(gram_matrix(tall), min(rank, d_o, d_i))
    sigma = torch.linalg.vector_norm(tall @ U, dim=0)
    sigma = sigma * (sigma > max(d_o, d_i) * torch.finfo(tau.dtype).eps * sigma.amax())
    V = (U if d_i <= d_o else torch.linalg.qr(tau.mT @ U).Q) * (sigma > 0)
    top = float(sigma.amax()) ** 2
    return TaskVector(V, norm, sigma.square() / (norm**2 or 1.0), norm**2 / top if top else 0.0)


def overlap(a: TaskVector, b: TaskVector, rank: int) -> float:
    """Mean squared cosine of the principal angles between the top ``rank`` directions of two task vectors.

    1: they use the same directions of a layer's input, so that merging one disturbs the other; chance is ``rank`` over
    the layer's width.
    """
    V, W = a.V[:, :rank], b.V[:, :rank]
    narrow, wide = sorted((V, W), key=lambda basis: int(basis.square().sum().round()))
    return float(subspace_affinity(narrow, wide))


def share_inside(tau: Tensor, V: Tensor) -> float:
    r"""Share :math:`\|\tau V\|_F^2 / \|\tau\|_F^2` of a task vector's energy that lies in a subspace ``(d_i, r)``."""
    total = float(tau.square().sum())
    return float((tau @ V).square().sum()) / total if total else 0.0
