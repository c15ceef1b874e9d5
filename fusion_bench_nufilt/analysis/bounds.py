r"""The two bounds of the paper: Theorem 1 (Section 3.4) and Corollary 1 (Section 4.2)."""

import math

import torch
from torch import Tensor

from fusion_bench_nufilt.nufilt.bases import top_eigenvectors
from fusion_bench_nufilt.nufilt.subspace import gram_matrix

from .surrogates import mean_square


def theorem_bounds(T_0: Tensor, E: Tensor, V_d: Tensor) -> tuple[float, float]:
    r"""Return both forms of the bound :math:`\zeta^2` on the misalignment 1 - A (Theorem 1).

    The task vector is :math:`\tau = T_0 + E`, ``(d_o, d_i)``; V_d, ``(d_i, r_d)``, spans the row
    space of T_0. A is the affinity of V_d and the top r_v >= r_d right singular vectors of tau. The
    first form measures E by the paper's :math:`\sqrt{d_o} \max_k \Psi_k`, the second one by
    :math:`\|E\|_2`, which the proof allows. A bound is infinite where the theorem's condition does
    not hold.
    """
    d_o = T_0.shape[0]
    r_d = V_d.shape[1]
    sigma = float(torch.linalg.svdvals(T_0 @ V_d)[r_d - 1])
    longest_row = float(torch.linalg.vector_norm(E, dim=1).max())
    bounds = []
    for error in (math.sqrt(d_o) * longest_row, spectral_norm(E)):
        zeta = error / (sigma - error) if sigma > error else math.inf
        bounds.append(zeta**2)
    return bounds[0], bounds[1]


def corollary_bound(D: Tensor, C: Tensor, V_hat: Tensor) -> tuple[float, float]:
    r"""Return both sides of Corollary 1, divided by the number of inputs, for
    :math:`D = \rho - \tau`.

    .. math:: \operatorname{tr}(D C D^\top)
        \le 2 \lambda_{\max}(C) \|D \hat V\|_F^2
        + 2 \|D\|_2^2 \operatorname{tr}((I - \hat V \hat V^\top) C)

    The second term is what the proof needs where the paper has
    :math:`2 \sigma_1(X)^2 r_d \zeta^2 \|D\|_2^2`, and is finite where the theorem's condition
    fails. D is ``(d_o, d_i)``, C ``(d_i, d_i)``, V_hat ``(d_i, r_v)``.
    """
    v = top_eigenvectors(C, 1)
    lambda_max = float(((C @ v) * v).sum())
    outside = float(C.trace() - ((C @ V_hat) * V_hat).sum())
    inside_term = 2 * lambda_max * float((D @ V_hat).square().sum())
    outside_term = 2 * spectral_norm(D) ** 2 * max(outside, 0.0)  # below 0 by rounding alone
    return float(mean_square(D, C)), inside_term + outside_term


def spectral_norm(X: Tensor) -> float:
    """Return the largest singular value."""
    if X.shape[1] > X.shape[0]:
        # The smaller of the two Gram matrices has the same largest eigenvalue.
        X = X.mT
    return float(torch.linalg.vector_norm(X @ top_eigenvectors(gram_matrix(X), 1)))
