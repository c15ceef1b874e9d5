"""Bases of a matrix's leading directions, for other methods and the analysis."""

from functools import lru_cache

import torch
from torch import Tensor

from .eigenvectors import gram_matrix, random_start, split_eigenvectors


def top_eigenvectors(gram: Tensor, rank: int) -> Tensor:
    """Return the top eigenvectors ``(..., d, rank)`` of a positive semidefinite matrix
    ``(..., d, d)``, the largest first.
    """
    block, _ = split_eigenvectors(gram, rank)
    return block[..., -rank:].flip(-1)


def leading_directions(
    X: Tensor, rank: int, extra: int, rounds: int
) -> tuple[Tensor, Tensor]:
    r"""Return about :math:`X V`, ``(m, rank)``, and the top right singular vectors V of
    X, ``(d, rank)``, the most important first.

    They are those within a :func:`leading_basis` of ``extra`` directions more, since
    the last ones of a basis are the least accurate. The price of two rounds with an
    eighth more directions: for singular values k^-0.9, the sum of an eighth of the
    directions is 2 to 4 % off, for k^-0.7 5 to 9 %, and for a Gaussian matrix, in which
    no direction leads, 70 to 85 %. After four rounds, the energy of 32 directions is
    0.2 % off for k^-0.4.
    """
    basis = leading_basis(X, rank + extra, rounds)
    Y = X @ basis
    W = torch.linalg.eigh(gram_matrix(Y.double())).eigenvectors
    W = W.flip(-1)[:, :rank].to(Y)
    return Y @ W, basis @ W


def leading_basis(X: Tensor, rank: int, rounds: int) -> Tensor:
    """Return an orthonormal basis ``(d, rank)`` that has about the leading right
    singular vectors of a matrix ``(m, d)``.

    It is randomized subspace iteration of a fixed number of rounds (Halko et al.,
    2011), of two products each: exact if the matrix has no more than ``rank``
    directions, and the less so the flatter the spectrum is.
    """
    basis = _start_of_basis(X.shape[1], rank, X.dtype).to(X.device)
    for _ in range(rounds):
        outputs = torch.linalg.qr(X @ basis).Q
        basis = torch.linalg.qr(X.mT @ outputs).Q
    return basis


# The layers of a shape come one after the other, and a GPU is faster than the draw. A
# method tries up to four ranks. On the CPU, since streams of a GPU would not know of
# each other that they read it.
@lru_cache(maxsize=4)
def _start_of_basis(d: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Return the :func:`random_start` of a basis, which nobody may write to."""
    return random_start(d, rank).to(dtype)
