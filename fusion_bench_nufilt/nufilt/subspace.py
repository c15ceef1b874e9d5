"""Singular subspaces of task vectors, how much two of them overlap, and the filter
P = I - V_p V_p^T (Section 4.1).

The columns of V_p are the top r_p right singular vectors of the cumulative update: the
input directions in which the merged model already differs from the pretrained one.
"""

import math
from typing import Literal

import torch
from torch import Tensor

# Perturbation theory may change a singular vector by this much in the first round and
# in the second, for spectra steeper than those of fine-tuned models. The error left is
# the square of the first (34 eps of float32) or a tenth of the second (168 eps).
_LARGEST_CHANGES = 2e-3, 2e-4

# A direction is stronger than rounding's if it is by this much: the edge of a finite
# matrix and the estimate of its energy are a few per cent off.
_MARGIN = 1.1
_TINY = torch.finfo(torch.float64).tiny  # for 0 / 0


class SteepSpectrumError(torch.linalg.LinAlgError):
    """A spectrum falls too steeply for float32, as where a matrix has exactly low rank,
    or is so flat that float32 can't tell its directions apart.
    """


def top_right_singular_vectors(
    tau: Tensor,
    rank: int,
    gram: Tensor | None = None,
    *,
    float64: bool = False,
    height: int | None = None,
    rounding: Tensor | None = None,
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
        float64: compute in float64, without ``gram``.
        height: the outputs of the layer, where ``tau`` is given in a basis of fewer.
        rounding: what the rounding of stored weights is expected to have added to
            ``tau``, ``(2, ...)``, see :func:`expected_rounding`.

    Returns:
        ``(..., d_i, r)``. Columns beyond the numerical rank (singular value at most
        ``max(d_o, d_i) * eps`` times the largest, numpy's rule, with the layer's sides)
        are zero, so that ``V @ V.mT`` is the orthogonal projector on the matrix's span;
        so are those of directions that are no stronger than rounding's, see
        :func:`above_rounding`.

    Raises:
        SteepSpectrumError: the spectrum falls too steeply for float32.
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
        converged = bool((change <= largest_change).all())
        if converged:
            break
    if tau.dtype == torch.float32 and not converged:
        # A Gram matrix has the squares, of which it knows those above a few roundings.
        weakest = sigma.where(sigma > 0, torch.inf).amin(dim=-1)
        is_steep = (
            weakest.square() < torch.finfo(dtype).eps ** 0.5 * sigma.amax(-1) ** 2
        )
        shape = "falls too steeply" if bool(is_steep.any()) else "is too flat"
        raise SteepSpectrumError(f"its spectrum {shape} for float32")
    # The corrected vectors are not orthogonal where the spectrum is steep. QR keeps the
    # span of the leading columns: the largest come first, the last may be rounding
    # alone.
    V = block[..., :rank]
    V = torch.linalg.qr(tau.mT @ V if wide else V).Q
    exist = sigma > 0
    if rounding is not None:
        # A norm of all values in float32 has an error of the size of rounding.
        energy = torch.linalg.vector_norm(tau, dim=-1).double().square().sum(dim=-1)
        squares = sigma[..., 0, :].square()
        stronger = above_rounding(squares, energy, rounding, height or d_o, d_i)
        exist &= stronger[..., None, :]
    return (V * exist).to(dtype)


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


def gram_matrix(X: Tensor, block: int = 256) -> Tensor:
    r"""Return :math:`X^\top X`, ``(..., d, d)``, of ``(..., m, d)``; half of its blocks
    are computed, half copied.
    """
    d = X.shape[-1]
    gram = X.new_empty(*X.shape[:-2], d, d)
    for i in range(0, d, block):
        rows, rest = slice(i, i + block), slice(i + block, d)
        gram[..., rows, i:] = X[..., rows].mT @ X[..., i:]
        gram[..., rest, rows] = gram[..., rows, rest].mT
    return gram


def split_eigenvectors(
    gram: Tensor, rank: int
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return more than ``rank`` top eigenvectors ``(..., d, k)`` of a positive
    semidefinite matrix, and the others.

    A few vectors of a large matrix come from block iteration, which does not know the
    others, and otherwise from a full solver: the faster choice, with the same residual
    of a few roundings of the norm. The others are vectors ``(..., d, d - k)`` and their
    eigenvalues ``(..., d - k)``, or None.
    """
    d = gram.shape[-1]
    if d >= 256 and 16 * rank <= d:
        block = _block_iteration(gram, rank)
        if block is not None:
            return block, None
    eigenvalues, vectors = torch.linalg.eigh(gram)
    # In the flat tails of language models the gap behind fewer drowns in rounding.
    more = max(16, rank // 2)
    n = max(0, d - rank - more)
    return vectors[..., n:], (vectors[..., :n], eigenvalues[..., :n])


def _block_iteration(gram: Tensor, rank: int, max_products: int = 96) -> Tensor | None:
    """Iterate a block of more than ``rank`` vectors, and return it, or None without
    convergence.

    Between two rounds of Rayleigh-Ritz, a Chebyshev polynomial of the matrix damps all
    eigenvalues below those of the block (Zhou and Saad, 2007). On nearly flat spectra,
    powers of the matrix would need several times the products.
    """
    start = random_start(gram.shape[-1], 2 * rank + 16)
    X = torch.linalg.qr(gram @ start.to(gram)).Q
    # The floor, where rounding takes over, is about 4.
    tolerance = 12 * torch.finfo(gram.dtype).eps
    products = 1
    while products < max_products:
        Y = gram @ X
        eigenvalues, Z = torch.linalg.eigh(X.mT @ Y)
        X, Y, eigenvalues = X @ Z, Y @ Z, eigenvalues[..., None, :]
        wanted, largest = eigenvalues[..., -rank:], eigenvalues[..., -1:]
        residual = torch.linalg.vector_norm(
            Y[..., -rank:] - X[..., -rank:] * wanted, dim=-2, keepdim=True
        )
        if (residual <= tolerance * largest).all():
            return X
        damped = eigenvalues[..., :1].maximum(tolerance * largest).where(largest > 0, 1)
        degree = _chebyshev_degree(wanted / damped)
        before, X = X, (2 / damped) * Y - X
        for _ in range(degree - 1):
            before, X = X, (4 / damped) * (gram @ X) - 2 * X - before
        X = torch.linalg.qr(X).Q
        products += degree
    return None


def random_start(d: int, rank: int) -> Tensor:
    """Return a matrix ``(d, rank)`` in float64 for an iteration to start from.

    It is random, so that no direction is missed, and always the same, so that results
    repeat, whatever torch's default device and dtype are.
    """
    cpu = torch.device("cpu")
    generator = torch.Generator(cpu).manual_seed(0)
    return torch.randn(d, rank, generator=generator, dtype=torch.float64, device=cpu)


def _chebyshev_degree(ratios: Tensor) -> int:
    """Return a degree at which rounding in the largest of the wanted vectors does not
    drown the smallest: it grows 1e6 times as much, an eighth of float32's 1 / eps.

    ``ratios`` ``(..., 1, rank)``, ascending, are their Ritz values over the end of the
    damped interval, beyond which the polynomial grows like exp(degree * arcosh(x)),
    at most to 1e15, whose square is in float32's range. 1e-3 only stands for 0.
    """
    growth = (2 * ratios.clamp_min(1) - 1).arccosh()
    largest = max(1e-3, float(growth.max()))
    spread = max(1e-3, float((growth[..., -1] - growth[..., 0]).max()))
    return int(max(2, min(8, math.log(1e6) / spread, math.log(1e15) / largest)))


def row_blocks(X: Tensor) -> list[slice]:
    """Return slices of the rows of matrices ``(..., m, d)``, to compute with one after
    the other: blocks of 2^17 elements, which stay in a processor's cache; on an
    accelerator, all rows at once.
    """
    step = max(1, X.shape[-2])
    if X.device.type == "cpu":
        step = max(1, 2**17 * step // max(1, X.numel()))
    return [slice(first, first + step) for first in range(0, X.shape[-2], step)]


#: The mean squared error of a stored value over its square, with a spacing of 1
#: relative to the power of two below: an error is spread evenly over one spacing, and
#: with magnitudes m 2^e whose logarithms are, too, the mean of m^-2 is 3 / (8 ln 2).
ROUNDING_VARIANCE = 3 / (8 * math.log(2)) / 12


def expected_rounding(theta_0: Tensor, tau: Tensor, spacing2: float) -> Tensor:
    r"""Return what is expected of the rounding errors in the difference ``tau`` of
    stored weights and ``theta_0``, ``(..., d_o, d_i)``: their energy and that of their
    strongest direction, ``(2, ...)``, in float64.

    ``spacing2`` is the square of the spacing of stored values, relative to the power of
    two below each, summed over the weights that were rounded. No row or column has more
    energy of errors than there is: those that are as they were have none.
    """
    variance = ROUNDING_VARIANCE * spacing2
    of_rows = []
    of_columns = tau.new_zeros(2, *tau[..., 0, :].shape, dtype=torch.float64)
    for rows in row_blocks(tau):
        changes = tau[..., rows, :].square()
        weights = (theta_0[..., rows, :] + tau[..., rows, :]).square_()
        of_columns += torch.stack([weights.sum(dim=-2), changes.sum(dim=-2)])
        sums = weights.sum(dim=-1), changes.sum(dim=-1), weights.amax(dim=-1)
        of_rows.append(torch.stack(sums).double())
    weights, changes, largest = torch.cat(of_rows, dim=-1)
    r = torch.minimum(variance * weights, changes)
    c = torch.minimum(variance * of_columns[0], of_columns[1])
    energy = torch.minimum(r.sum(dim=-1), c.sum(dim=-1))
    # A value that is much larger than all others is less even than its row and column.
    lone = torch.minimum(4 * variance * largest, changes).amax(dim=-1)
    return torch.stack([energy, lone.maximum(energy * share_of_norm(r, c))])


def share_of_norm(r: Tensor, c: Tensor) -> Tensor:
    r"""Return the squared norm of large random matrices over their energy, ``(...)``,
    given the expected energies of their rows and columns.

    With independent entries, whose energy is :math:`r_i c_j` where those of all rows
    and columns are 1, it is the least :math:`t\,h(r)\,h(c)` of all t, where
    :math:`\sum_i r_i / (h(r) - r_i) = t` (Lehner, 1999; Bandeira, Boedihardjo and van
    Handel, 2023): Marchenko and Pastur's edge if they are even.
    """
    # Powers of two, of which the best is within 3 % of the least.
    count = max(r.shape[-1], c.shape[-1]).bit_length() + 1
    t = torch.arange(count, dtype=r.dtype, device=r.device).exp2()
    return (t * _heights(r, t) * _heights(c, t)).amin(dim=-1)


def _heights(r: Tensor, t: Tensor) -> Tensor:
    """Return h(r) of :func:`share_of_norm` for each t, ``(..., k)``."""
    r = (r / r.sum(dim=-1, keepdim=True).clamp_min(_TINY))[..., None, :]
    # That of the largest entry alone, from where Newton's method for 1 / t rises to h.
    h = (r.amax(dim=-1) * (1 + 1 / t)).clamp_min(_TINY)
    for _ in range(12):
        parts = r / (h[..., None] - r)
        s, squares = parts.sum(dim=-1), parts.square().sum(dim=-1)
        h = h * (1 + (s / t - 1) * s / (s + squares).clamp_min(_TINY))
    return h


def above_rounding(
    squares: Tensor, energy: Tensor, rounding: Tensor, d_o: int, d_i: int
) -> Tensor:
    """Tell which directions of matrices ``(d_o, d_i)`` are stronger than any of their
    rounding errors.

    The energy of these errors is at most what is expected, and at most what is left
    without the directions that are stronger: a matrix of exactly low rank has none.

    Args:
        squares: the largest squared singular values ``(..., k)``, the largest first.
        energy: the sum of all of them, ``(...)``.
        rounding: what is expected of the errors, ``(2, ...)``.

    Returns:
        ``(..., k)``, of which the first is true wherever there is any energy.
    """
    squares, energy = squares.double(), energy.double()
    unknown = 16 * torch.finfo(torch.float32).eps * energy  # what sums may miss
    expected, strongest = rounding.double()
    noise = torch.minimum(expected, energy)
    count = torch.zeros_like(noise)
    while True:
        edge = _MARGIN**2 * strongest * noise / expected.clamp_min(_TINY)
        stronger = squares > edge[..., None]
        stronger[..., 0] = squares[..., 0] > 0
        count_before, count = count, stronger.sum(dim=-1).to(noise)
        if torch.equal(count, count_before):
            return stronger
        rest = energy - (squares * stronger).sum(dim=-1)
        # The stronger directions also have their part of the errors.
        share = ((1 - count / d_o) * (1 - count / d_i)).clamp_min(1 / (d_o * d_i))
        noise = torch.minimum(noise, rest.maximum(unknown) / share)


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
