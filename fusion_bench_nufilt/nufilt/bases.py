"""Bases of a matrix's leading directions, for other methods and the analysis."""

import torch
from torch import Tensor

from .subspace import random_start, split_eigenvectors, top_right_singular_vectors


def right_singular_basis(tau: Tensor, rank: int) -> Tensor:
    """Return :func:`top_right_singular_vectors` of one matrix, in float64 on the CPU
    where its spectrum needs that.
    """
    try:
        return top_right_singular_vectors(tau, rank)
    except torch.linalg.LinAlgError:
        return top_right_singular_vectors(tau.cpu(), rank, float64=True).to(tau.device)


def top_eigenvectors(gram: Tensor, rank: int) -> Tensor:
    """Return the top eigenvectors ``(..., d, rank)`` of a positive semidefinite matrix
    ``(..., d, d)``, the largest first.
    """
    block, _ = split_eigenvectors(gram, rank)
    return block[..., -rank:].flip(-1)


def leading_basis(X: Tensor, rank: int, rounds: int) -> Tensor:
    """Return an orthonormal basis ``(d, rank)`` that has about the leading right
    singular vectors of a matrix ``(m, d)``.

    It is randomized subspace iteration of a fixed number of rounds (Halko et al.,
    2011), of two products each: exact if the matrix has no more than ``rank``
    directions, and the less so the flatter the spectrum is.
    """
    basis = random_start(X.shape[1], rank).to(X)
    for _ in range(rounds):
        outputs = torch.linalg.qr(X @ basis).Q
        basis = torch.linalg.qr(X.mT @ outputs).Q
    return basis
