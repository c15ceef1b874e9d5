"""Singular subspaces of task vectors, and how much two subspaces overlap."""

import torch
from torch import Tensor


def top_right_singular_vectors(tau: Tensor, rank: int, gram: Tensor | None = None) -> Tensor:
    r"""Orthonormal basis of the span of the top right singular vectors.

    The spectrum comes from the smaller Gram matrix: :math:`\tau^\top\tau` for a tall or square matrix,
    :math:`\tau\tau^\top` for a wide one, whose left vectors are mapped back by :math:`\tau^\top`.

    Args:
        tau: matrices of shape ``(..., d_o, d_i)``, float32 or float64.
        rank: number of vectors r; clipped to ``min(d_o, d_i)``.
        gram: :math:`\tau^\top\tau`, ``(..., d_i, d_i)``, if it is at hand already.

    Returns:
        ``(..., d_i, r)``. Columns beyond the numerical rank (singular value at most ``max(d_o, d_i) * eps`` times
        the largest, numpy's rule) are zero, so ``V @ V.mT`` is the orthogonal projector on what the matrix spans.
    """
    d_o, d_i = tau.shape[-2:]
    rank = min(rank, d_o, d_i)
    if rank == 0:
        return tau.new_zeros(*tau.shape[:-2], d_i, 0)
    if gram is not None or d_i <= d_o:
        V = top_eigenvectors(gram_matrix(tau) if gram is None else gram, rank)
    else:
        # QR keeps the leading columns' span, so the largest must come first: the last may be rounding alone.
        V = torch.linalg.qr(tau.mT @ top_eigenvectors(gram_matrix(tau.mT), rank)).Q
    # A Gram matrix squares the singular values and with them the rounding; ||tau v|| does not.
    sigma = torch.linalg.vector_norm(tau @ V, dim=-2, keepdim=True)
    cutoff = max(d_o, d_i) * torch.finfo(tau.dtype).eps * sigma.amax(dim=-1, keepdim=True)
    return V * (sigma > cutoff)


def gram_matrix(X: Tensor, block: int = 256) -> Tensor:
    r""":math:`X^\top X`, ``(..., d, d)``, of ``(..., m, d)``: one triangle of blocks computed, the other copied."""
    d = X.shape[-1]
    gram = X.new_empty(*X.shape[:-2], d, d)
    for i in range(0, d, block):
        rows, rest = slice(i, i + block), slice(i + block, d)
        gram[..., rows, i:] = X[..., rows].mT @ X[..., i:]
        gram[..., rest, rows] = gram[..., rows, rest].mT
    return gram


def top_eigenvectors(gram: Tensor, rank: int) -> Tensor:
    """Eigenvectors ``(..., d, rank)`` of positive semidefinite ``(..., d, d)``, those of the largest eigenvalues first.

    A few vectors of a large matrix come from block iteration, many or those of a small one from a full solver,
    whichever is faster (``docs/results/speed.md``); both end at the same residual, a few roundings of the norm.
    """
    d = gram.shape[-1]
    vectors = _block_iteration(gram, rank) if d >= 256 and 16 * rank <= d else None
    if vectors is None:
        vectors = torch.linalg.eigh(gram).eigenvectors[..., -rank:]
    return vectors.flip(-1)


def _block_iteration(gram: Tensor, rank: int, max_rounds: int = 24) -> Tensor | None:
    """Subspace iteration on a block of ``2 rank + 16`` vectors with Rayleigh-Ritz; None if it does not converge."""
    d, block = gram.shape[-1], 2 * rank + 16
    # The start is random, so that no eigenvector is missed, and always the same, so that results repeat.
    start = torch.randn(d, block, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    X = torch.linalg.qr(start).Q.to(gram).expand(*gram.shape[:-2], -1, -1)
    tolerance = 12 * torch.finfo(gram.dtype).eps  # the floor, where rounding takes over, is about 4
    for _ in range(max_rounds):
        Y = gram @ X
        eigenvalues, Z = torch.linalg.eigh(X.mT @ Y)
        X, Y = X @ Z, Y @ Z
        residual = (Y - X * eigenvalues[..., None, :])[..., -rank:]
        largest = eigenvalues[..., -1]
        if (torch.linalg.vector_norm(residual, dim=-2).amax(dim=-1) <= tolerance * largest).all():
            return X[..., -rank:]
        X = torch.linalg.qr(gram @ Y).Q
    return None


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
