"""Top right singular vectors of task vectors, from Gram matrices, without a full SVD."""

import math
from typing import Optional, Tuple

import torch
from torch import Tensor

# Perturbation theory may change a singular vector by this much in the first round and
# in the second. What is left of the error is about the square of the first change, or a
# tenth of the second.
LARGEST_CHANGES = (2e-3, 2e-4)


def top_right_singular_vectors(
    tau: Tensor, rank: int, gram: Optional[Tensor] = None, exact: bool = False
) -> Tensor:
    """
    Return an orthonormal basis of the span of the top right singular vectors.

    They come from the smaller Gram matrix, which squares the singular values and with
    them the rounding; ``tau`` itself then corrects its eigenvectors.

    Args:
        tau: matrices (n, d_o, d_i) in float32 or float64.
        rank: the number of vectors; it is clipped to min(d_o, d_i).
        gram: ``tau.mT @ tau``, if it is at hand already.
        exact: compute in float64 on the CPU.

    Returns:
        Tensor: (n, d_i, rank). Columns beyond the numerical rank (numpy's rule) are zero,
            so that ``V @ V.mT`` is the projector on the span of the matrix.

    Raises:
        torch.linalg.LinAlgError: the spectrum falls too steeply for float32.
    """
    n, d_o, d_i = tau.shape
    rank = min(rank, d_o, d_i)
    if rank == 0:
        return tau.new_zeros(n, d_i, 0)
    like, cutoff = tau, max(d_o, d_i) * torch.finfo(tau.dtype).eps
    if exact:
        tau, gram = tau.to("cpu", torch.float64), None
    wide = gram is None and d_i > d_o
    X = tau.mT if wide else tau
    block, others = split_eigenvectors(gram_matrix(X) if gram is None else gram, rank)
    for largest_change in LARGEST_CHANGES:
        block, sigma, change = refine(X, block, others, rank, cutoff)
        if converged := bool((change <= largest_change).all()):
            break
    if tau.dtype == torch.float32 and not converged:
        raise torch.linalg.LinAlgError(
            "the singular vectors are too inaccurate in float32"
        )
    V = block[..., :rank]
    # The corrected vectors are not orthogonal; QR keeps the span of the leading columns
    V = torch.linalg.qr(tau.mT @ V if wide else V).Q
    return (V * (sigma > 0)).to(like)


def gram_matrix(X: Tensor, block: int = 256) -> Tensor:
    """Return ``X.mT @ X`` (n, d, d); half of its blocks are computed, half copied."""
    n, _, d = X.shape
    gram = X.new_empty(n, d, d)
    for i in range(0, d, block):
        rows, rest = slice(i, i + block), slice(i + block, d)
        gram[:, rows, i:] = X[..., rows].mT @ X[..., i:]
        gram[:, rest, rows] = gram[:, rows, rest].mT
    return gram


def split_eigenvectors(
    gram: Tensor, rank: int
) -> Tuple[Tensor, Optional[Tuple[Tensor, Tensor]]]:
    """
    Return more than ``rank`` top eigenvectors of Gram matrices (n, d, d), and the others.

    A few vectors of a large matrix come from block iteration, which does not know the
    others (None); otherwise a full solver is faster. Both end at the same residual.
    """
    d = gram.shape[-1]
    if d >= 256 and 16 * rank <= d:
        block = block_iteration(gram, rank)
        if block is not None:
            return block, None
    eigenvalues, vectors = torch.linalg.eigh(gram)
    n = max(0, d - rank - 16)
    return vectors[..., n:], (vectors[..., :n], eigenvalues[..., :n])


def block_iteration(gram: Tensor, rank: int) -> Optional[Tensor]:
    """
    Iterate ``2 * rank + 16`` vectors with Rayleigh-Ritz; None without convergence.

    Between two rounds, a Chebyshev polynomial of the matrix damps all eigenvalues below
    those of the block (Zhou and Saad, 2007), to a degree at which rounding in the largest
    wanted vector hides no smaller one, and nothing overflows.
    """
    shape = (gram.shape[-1], 2 * rank + 16)
    # Random, so that no eigenvector is missed, and always the same, so that results repeat
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    X = torch.linalg.qr(gram @ start.to(gram)).Q
    tolerance, products = 12 * torch.finfo(gram.dtype).eps, 1
    while products < 96:
        Y = gram @ X
        eigenvalues, Z = torch.linalg.eigh(X.mT @ Y)
        X, Y, eigenvalues = X @ Z, Y @ Z, eigenvalues[:, None, :]
        wanted, smallest = eigenvalues[..., -rank:], tolerance * eigenvalues[..., -1:]
        residual = Y[..., -rank:] - X[..., -rank:] * wanted
        error = torch.linalg.vector_norm(residual, dim=-2, keepdim=True)
        if (error <= smallest).all():
            return X
        damped = eigenvalues[..., :1].maximum(smallest).where(smallest > 0, 1)
        growth = (2 * (wanted / damped).clamp_min(1) - 1).arccosh()
        spread = max(1e-3, float((growth[..., -1] - growth[..., 0]).max()))
        largest = max(1e-3, float(growth.max()))
        degree = int(max(2, min(8, math.log(1e6) / spread, math.log(1e15) / largest)))
        before, X = X, (2 / damped) * Y - X
        for _ in range(degree - 1):
            before, X = X, (4 / damped) * (gram @ X) - 2 * X - before
        X = torch.linalg.qr(X).Q
        products += degree
    return None


def refine(
    X: Tensor,
    block: Tensor,
    others: Optional[Tuple[Tensor, Tensor]],
    rank: int,
    cutoff: float,
) -> Tuple[Tensor, Tensor, Tensor]:
    """
    Turn approximate eigenvectors of ``X.T @ X`` into right singular vectors of X.

    Rayleigh-Ritz within the block comes first. One step of perturbation theory follows
    for what lies outside of it: with the residual R = X^T X V - V Lambda, the component
    of v_j along another eigenvector u_i is u_i^T R_j / (lambda_j - mu_i). If the others
    are not known, a power step takes their place, and their eigenvalues count as zero.

    Returns:
        Tuple[Tensor, Tensor, Tensor]: a better block, whose first ``rank`` columns are the
            vectors, the largest singular value first; their singular values, zero beyond
            the numerical rank; and how much perturbation theory changed each of them.
    """
    block = torch.linalg.qr(X.mT @ (X @ block) if others is None else block).Q
    Y = X @ block
    W = torch.linalg.eigh(Y.mT.double() @ Y.double()).eigenvectors.flip(-1).to(X)
    block, Y = block @ W, Y @ W[..., :rank]
    sigma = torch.linalg.vector_norm(Y, dim=-2, keepdim=True)
    sigma = sigma * (sigma > cutoff * sigma.amax(dim=-1, keepdim=True))
    squares, V = sigma.square(), block[..., :rank]
    residual = (X.mT @ Y - V * squares) * (sigma > 0)
    tiny = torch.finfo(X.dtype).tiny
    if others is None:
        change = residual / squares.clamp_min(tiny)
    else:
        U, mu = others
        change = U @ (U.mT @ residual / (squares - mu[..., None]).clamp_min(tiny))
    size = torch.linalg.vector_norm(change, dim=-2, keepdim=True)
    # perturbation theory does not hold for larger changes
    V = torch.where(size < 1, V + change, V)
    return torch.cat([V, block[..., rank:]], dim=-1), sigma, size
