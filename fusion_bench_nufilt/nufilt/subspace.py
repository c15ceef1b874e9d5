"""Singular subspaces of task vectors, how much two of them overlap, and the filter
P = I - V_p V_p^T (Section 4.1).

The columns of V_p are the top r_p right singular vectors of the cumulative update: the
input directions in which the merged model already differs from the pretrained one.
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from .eigenvectors import gram_matrix, split_eigenvectors
from .noise import Noise, above_noise

# Perturbation theory may change a singular vector by this much in the first round and
# in the second, for spectra steeper than those of fine-tuned models. The error left is
# the square of the first (34 eps of float32) or a tenth of the second (168 eps).
_LARGEST_CHANGES = 2e-3, 2e-4


def top_right_singular_vectors(
    tau: Tensor,
    rank: int,
    gram: Tensor | None = None,
    *,
    float64: bool = False,
    height: int | None = None,
    noise: Noise | None = None,
) -> Tensor:
    r"""Return an orthonormal basis of the span of the top right singular vectors.

    They come from the smaller Gram matrix: :math:`\tau^\top\tau` for a tall or square
    matrix, and :math:`\tau\tau^\top` for a wide one, whose left vectors are mapped back
    by :math:`\tau^\top`. A Gram matrix squares the singular values and with them the
    rounding; :math:`\tau` itself then corrects its eigenvectors.

    Args:
        tau: matrices of shape ``(..., d_o, d_i)``, float32 or float64.
        rank: the number r of vectors, which is clipped to ``min(d_o, d_i)``.
        gram: :math:`\tau^\top\tau`, if it is at hand already.
        float64: compute in float64, without ``gram``. A matrix in float32 whose
            spectrum falls too steeply for that, as where it has exactly low rank, or is
            too flat, is computed so in any case.
        height: the outputs of the layer, where ``tau`` is given in a basis of fewer.
        noise: what the rounding of stored weights is expected to have added to ``tau``.

    Returns:
        ``(..., d_i, r)``. Columns beyond the numerical rank (singular value at most
        ``max(d_o, d_i) * eps`` times the largest, numpy's rule, with the layer's sides)
        are zero, so that ``V @ V.mT`` is the orthogonal projector on the matrix's span;
        so are those of directions that are no stronger than the noise, see
        :func:`.above_noise`.

    Raises:
        torch.linalg.LinAlgError: an eigenvalue solver failed.
    """
    d_o, d_i = tau.shape[-2:]
    rank = min(rank, d_o, d_i)
    if rank == 0:
        return tau.new_zeros(*tau.shape[:-2], d_i, 0)
    dtype = tau.dtype
    cutoff = max(height or d_o, d_i) * torch.finfo(dtype).eps
    if float64:
        tau, gram = tau.double(), None
    wide = gram is None and d_i > d_o
    X = tau.mT if wide else tau
    block, others = split_eigenvectors(gram_matrix(X) if gram is None else gram, rank)
    for largest_change in _LARGEST_CHANGES:
        block, sigma, change = _refine(X, block, others, rank, cutoff)
        converged = (change <= largest_change).flatten(-2).all(dim=-1)
        if converged.all():
            break
    # A Gram matrix has the squares, of which it knows those above a few roundings.
    is_float32 = tau.dtype == torch.float32
    in_float64 = partial(
        top_right_singular_vectors, rank=rank, float64=True, height=height
    )
    if is_float32 and not converged.any():
        del block, others
        return in_float64(tau, noise=noise)
    # The corrected vectors are not orthogonal where the spectrum is steep. QR keeps the
    # span of the leading columns: the largest come first, the last may be rounding
    # alone.
    V = block[..., :rank]
    V = torch.linalg.qr(tau.mT @ V if wide else V).Q
    exist = sigma > 0
    if noise is not None:
        # A norm of all values in float32 has an error of the size of rounding.
        energy = torch.linalg.vector_norm(tau, dim=-1).double().square().sum(dim=-1)
        squares = sigma[..., 0, :].square()
        stronger = above_noise(squares, energy, noise, height or d_o, d_i)
        exist &= stronger[..., None, :]
    V = (V * exist).to(dtype)
    if is_float32 and not converged.all():  # in a stack
        failed = ~converged
        if noise is not None:
            noise = Noise(noise.energy[failed], noise.strongest[failed])
        V[failed] = in_float64(tau[failed], noise=noise)
    return V


def _refine(
    X: Tensor,  # (..., m, d)
    block: Tensor,  # approximate top eigenvectors, (..., d, k) with k > rank
    # the other eigenvectors (..., d, d - k) and eigenvalues (..., d - k)
    others: tuple[Tensor, Tensor] | None,
    rank: int,
    cutoff: float,  # singular values up to this share of the largest count as zero
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return right singular vectors of X from eigenvectors of its Gram matrix, without
    the rounding of that matrix.

    Rayleigh-Ritz within the block comes first. One step of perturbation theory follows
    for what lies outside: with the residual :math:`R = X^\top X V - V \Lambda`, the
    component of :math:`v_j` along another eigenvector :math:`u_i` is
    :math:`u_i^\top R_j / (\lambda_j - \mu_i)`. The error that is left is about its
    square. If the others are not known, a power step before takes their place, and
    their eigenvalues count as zero.

    Returns:
        A better block, whose first ``rank`` columns are the wanted vectors, the largest
        singular value first; their singular values, zero beyond the numerical rank; and
        how much they were changed, both ``(..., 1, rank)``.
    """
    block = torch.linalg.qr(X.mT @ (X @ block) if others is None else block).Q
    Y = X @ block
    W = torch.linalg.eigh(Y.mT.double() @ Y.double()).eigenvectors.flip(-1).to(X)
    block, Y = block @ W, Y @ W[..., :rank]
    sigma = torch.linalg.vector_norm(Y, dim=-2, keepdim=True)
    sigma = sigma * (sigma > cutoff * sigma.amax(dim=-1, keepdim=True))
    squares = sigma.square()
    V = block[..., :rank]
    residual = (X.mT @ Y - V * squares) * (sigma > 0)
    tiny = torch.finfo(X.dtype).tiny
    if others is None:
        change = residual / squares.clamp_min(tiny)
    else:
        U, mu = others
        change = U @ (U.mT @ residual / (squares - mu[..., None]).clamp_min(tiny))
    size = torch.linalg.vector_norm(change, dim=-2, keepdim=True)
    # Perturbation theory does not hold elsewhere.
    V = torch.where(size < 1, V + change, V)
    return torch.cat([V, block[..., rank:]], dim=-1), sigma, size


def subspace_affinity(V: Tensor, W: Tensor) -> Tensor:
    r"""Return the affinity :math:`\|W^\top V\|_F^2 / r` of two subspaces (paper,
    Section 3.4), in [0, 1].

    V ``(..., d, r)`` and W ``(..., d, s)`` have orthonormal (or zero) columns; r counts
    the non-zero ones of V. The affinity ``(...)`` is 1 where span(V) lies inside
    span(W), and 0 where they are orthogonal or V is zero.
    """
    r = V.square().sum(dim=(-2, -1)).round().clamp_min(1)
    return (W.mT @ V).square().sum(dim=(-2, -1)) / r


def null_space_filter(
    tau: Tensor, V_p: Tensor, null_space: bool | Literal["zero"] = True
) -> Tensor:
    r"""Return :math:`\tau P`, ``(..., d_o, d_i)``, for the P of
    ``StepConfig.null_space``, which is never formed.
    """
    if null_space is True:
        protected = (tau @ V_p) @ V_p.mT
        return protected.neg_().add_(tau)
    if null_space == "zero":
        return torch.zeros_like(tau)
    return tau  # the same object tells the caller that P = I


def first_coordinates(tau: Tensor, rank: int, height: int | None = None) -> Tensor:
    r"""Return the V_p ``(..., d_i, r)`` of the authors' released run at the first task:
    the first input coordinates.

    Its :math:`\tilde\tau` is zero there, and the "top singular vectors" of a zero
    matrix come out as unit vectors. ``tau`` is ``(..., d_o, d_i)``, and the rank is
    clipped to ``min(d_o, d_i)``, with the layer's ``height`` as d_o where ``tau`` is
    given in a basis of fewer outputs.
    """
    d_o, d_i = tau.shape[-2:]
    unit = torch.eye(
        d_i, min(rank, height or d_o, d_i), dtype=tau.dtype, device=tau.device
    )
    return unit.expand(*tau.shape[:-2], -1, -1)
