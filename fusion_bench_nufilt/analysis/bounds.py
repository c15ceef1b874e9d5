"""Theorem 1 and Corollary 1 (paper, Sections 3.4 and 4.2), to be checked on matrices."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion_bench_nufilt.core.subspace import gram_matrix, right_singular_basis, subspace_affinity, top_eigenvectors

from .surrogates import mean_square


@dataclass(frozen=True)
class TheoremCheck:
    r"""The measured misalignment 1 - A beside the theorem's bound :math:`\zeta^2`.

    ``zeta`` is with the paper's :math:`\sqrt{d_o} \max_k \Psi_k`, ``zeta_spectral`` with :math:`\|E\|_2` in its
    place, which the proof allows. Infinite: the theorem's condition does not hold, and it says nothing.
    """

    misalignment: float
    zeta: float
    zeta_spectral: float

    @property
    def violated(self) -> bool:
        """Whether this refutes the theorem, with an allowance for rounding."""
        return self.misalignment > min(self.zeta, self.zeta_spectral) ** 2 + 1e-5


def check_theorem(T_0: Tensor, E: Tensor, V_d: Tensor, rank: int) -> TheoremCheck:
    r"""Evaluate Theorem 1 for :math:`\tau = T_0 + E` ``(d_o, d_i)`` and its top r_v = ``rank`` directions.

    The row space of T_0 is spanned by V_d, ``(d_i, r_d)`` with r_d <= r_v.
    """
    r_d = V_d.shape[-1]
    sigma = float(torch.linalg.svdvals(T_0 @ V_d)[r_d - 1])
    rows = math.sqrt(len(E)) * float(torch.linalg.vector_norm(E, dim=-1).max())
    A = float(subspace_affinity(V_d, right_singular_basis(T_0 + E, rank)))
    return TheoremCheck(1 - A, _zeta(sigma, rows), _zeta(sigma, spectral_norm(E)))


def split_by_data(tau: Tensor, V_d: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the best :math:`T_0 = \tau V_d V_d^\top` for the data's subspace, and :math:`E = \tau - T_0`."""
    T_0 = (tau @ V_d) @ V_d.mT
    return T_0, tau - T_0


def corollary_bound(D: Tensor, C: Tensor, V_hat: Tensor) -> tuple[float, float]:
    r"""Return both sides of Corollary 1, divided by the number of inputs, for :math:`D = \rho - \tau`.

    .. math:: \operatorname{tr}(D C D^\top)
        \le 2 \lambda_{\max}(C) \|D \hat V\|_F^2 + 2 \|D\|_2^2 \operatorname{tr}((I - \hat V \hat V^\top) C)

    The second term stands in for the paper's :math:`2 \sigma_1(X)^2 r_d \zeta^2 \|D\|_2^2`: it is what the proof needs,
    measured on the data, and is finite where the theorem's condition fails. Shapes are D ``(d_o, d_i)``, C
    ``(d_i, d_i)`` and V_hat ``(d_i, r_v)``.
    """
    largest = top_eigenvectors(C, 1)
    lambda_max = float(((C @ largest) * largest).sum())
    left_out = float(C.trace() - ((C @ V_hat) * V_hat).sum())
    bound = 2 * lambda_max * float((D @ V_hat).square().sum()) + 2 * spectral_norm(D) ** 2 * max(left_out, 0.0)
    return float(mean_square(D, C)), bound


def spectral_norm(X: Tensor) -> float:
    """Return the largest singular value."""
    if X.shape[-1] > X.shape[-2]:
        X = X.mT
    return float(torch.linalg.vector_norm(X @ top_eigenvectors(gram_matrix(X), 1)))


def _zeta(sigma: float, error: float) -> float:
    return error / (sigma - error) if sigma > error else math.inf
