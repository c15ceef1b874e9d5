"""Top eigenvectors of Gram matrices: by a full solver, or a few by block iteration."""

import math

import torch
from torch import Tensor


def gram_matrix(X: Tensor, block: int = 256) -> Tensor:
    r"""Return :math:`X^\top X` ``(..., d, d)``, half of whose blocks are copied."""
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
