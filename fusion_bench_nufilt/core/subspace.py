"""Singular subspaces of task vectors, and how much two subspaces overlap."""

import torch
from torch import Tensor


def top_right_singular_vectors(tau: Tensor, rank: int) -> Tensor:
    r"""Orthonormal basis of the span of the top right singular vectors.

    The spectrum comes from the smaller Gram matrix: :math:`\tau^\top\tau` for a tall or square matrix,
    :math:`\tau\tau^\top` for a wide one, whose left vectors are mapped back by :math:`\tau^\top`.

    Args:
        tau: matrices of shape ``(..., d_o, d_i)``, float32 or float64.
        rank: number of vectors r; clipped to ``min(d_o, d_i)``.

    Returns:
        ``(..., d_i, r)``, columns ordered by falling singular value. Columns beyond the numerical rank
        (singular value at most ``max(d_o, d_i) * eps`` times the largest, numpy's rule) are zero, so
        ``V @ V.mT`` is the orthogonal projector on what the matrix really spans.
    """
    d_o, d_i = tau.shape[-2:]
    rank = min(rank, d_o, d_i)
    if rank == 0:
        return tau.new_zeros(*tau.shape[:-2], d_i, 0)
    if d_i <= d_o:
        V = _top_eigenvectors(tau.mT @ tau, rank)
    else:
        V = torch.linalg.qr(tau.mT @ _top_eigenvectors(tau @ tau.mT, rank)).Q
    # A Gram matrix squares the singular values and with them the rounding; ||tau v|| does not.
    sigma = torch.linalg.vector_norm(tau @ V, dim=-2, keepdim=True)
    cutoff = max(d_o, d_i) * torch.finfo(tau.dtype).eps * sigma.amax(dim=-1, keepdim=True)
    return V * (sigma > cutoff)


def _top_eigenvectors(gram: Tensor, rank: int) -> Tensor:
    """Eigenvectors ``(..., d, rank)`` of the largest eigenvalues of symmetric ``(..., d, d)``, largest first."""
    return torch.linalg.eigh(gram).eigenvectors[..., -rank:].flip(-1)


def subspace_affinity(V: Tensor, W: Tensor) -> Tensor:
    r"""Affinity :math:`\|W^\top V\|_F^2 / r` of two subspaces (paper, Section 4), in [0, 1].

    Args:
        V: orthonormal (or zero) columns ``(..., d, r)``; r counts the non-zero ones.
        W: orthonormal (or zero) columns ``(..., d, s)``.

    Returns:
        ``(...)``: 1 where span(V) lies inside span(W), 0 where they are orthogonal or V is zero.
    """
    r = V.square().sum(dim=(-2, -1)).round().clamp_min(1)
    return (W.mT @ V).square().sum(dim=(-2, -1)) / r
