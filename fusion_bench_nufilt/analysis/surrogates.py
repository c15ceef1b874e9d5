r"""Surrogates of stability and plasticity (paper, Section 3.3), their data-free counterparts, and
bounds.

The data enter only through the uncentred second moment :math:`C = \frac1N \sum_n x_n x_n^\top` of a
layer's inputs: once it is recorded, no data is needed.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion_bench_nufilt.core.subspace import (
    gram_matrix,
    right_singular_basis,
    subspace_affinity,
    top_eigenvectors,
)


def mean_square(D: Tensor, C: Tensor) -> Tensor:
    r"""Return :math:`E\|D x\|^2 = \operatorname{tr}(D C D^\top)`, ``(...)``, for D ``(..., d_o,
    d_i)`` and C of x.
    """
    return ((D @ C) * D).sum(dim=(-2, -1)).clamp_min(0)  # a negative value is rounding error


def layer_losses(
    W_new: Tensor, W_old: Tensor, W_task: Tensor, C_old: Tensor | None, C_task: Tensor
) -> dict[str, float | None]:
    r"""Return both surrogates of a layer for inputs with given second moments. Lower is better.

    They are ``stability``, :math:`E_{x\sim\text{old tasks}} \|(W_m(t) - W_m(t-1)) x\|^2`, and
    ``plasticity``, :math:`E_{x\sim\text{task }t} \|(W_m(t) - W_t) x\|^2`; the relative ones are
    over :math:`E \|W_m(t-1) x\|^2` and :math:`E \|W_t x\|^2`. Stability is None without old tasks,
    and a relative loss where all outputs are zero.
    """
    names = ("stability", "plasticity", "relative_stability", "relative_plasticity")
    found: dict[str, float | None] = dict.fromkeys(names)
    for name, W, C in (("stability", W_old, C_old), ("plasticity", W_task, C_task)):
        if C is not None:
            loss, size = float(mean_square(W_new - W, C)), float(mean_square(W, C))
            found |= {name: loss, f"relative_{name}": loss / size if size else None}
    return found


def harmonic_mean(a: float, b: float) -> float:
    """Return 2ab / (a + b), or 0 if both are 0."""
    return 2 * a * b / (a + b) if a + b else 0.0


def data_free_losses(
    tau_new: Tensor, tau_old: Tensor, tau_task: Tensor, V_p: Tensor, V_t: Tensor
) -> tuple[float, float]:
    r"""Return the method's own surrogates :math:`\|(\tilde\tau_t - \tilde\tau_{t-1}) V_p\|_F^2` and
    :math:`\|(\tilde\tau_t - \tau_t) V_t\|_F^2` (Section 4.2): stability and plasticity without
    data.

    The updates of the merged model after the step and before it, and the new task vector, are
    ``(d_o, d_i)``; V_p ``(d_i, r_p)`` and V_t ``(d_i, r_v)`` are top right singular vectors of the
    last two.
    """

    def loss(D: Tensor, V: Tensor) -> float:
        inside, whole = float((D @ V).square().sum()), float(D.square().sum())
        return (
            inside if inside > torch.finfo(D.dtype).eps * whole else 0.0
        )  # else it is rounding error

    return loss(tau_new - tau_old, V_p), loss(tau_new - tau_task, V_t)


@dataclass(frozen=True)
class TheoremCheck:
    r"""The measured misalignment 1 - A beside the bound :math:`\zeta^2` of Theorem 1 (Section 3.4).

    ``zeta`` is with the paper's :math:`\sqrt{d_o} \max_k \Psi_k`, ``zeta_spectral`` with
    :math:`\|E\|_2`, which the proof allows. It is infinite where the theorem's condition does not
    hold.
    """

    misalignment: float
    zeta: float
    zeta_spectral: float

    @property
    def violated(self) -> bool:
        return self.misalignment > min(self.zeta, self.zeta_spectral) ** 2 + 1e-5


def check_theorem(T_0: Tensor, E: Tensor, V_d: Tensor, rank: int) -> TheoremCheck:
    r"""Evaluate Theorem 1 for :math:`\tau = T_0 + E` ``(d_o, d_i)`` and its top r_v = ``rank``
    directions.

    The row space of T_0 is spanned by V_d, ``(d_i, r_d)`` with r_d <= r_v.
    """
    r_d = V_d.shape[-1]
    sigma = float(torch.linalg.svdvals(T_0 @ V_d)[r_d - 1])
    rows = math.sqrt(len(E)) * float(torch.linalg.vector_norm(E, dim=-1).max())
    A = float(subspace_affinity(V_d, right_singular_basis(T_0 + E, rank)))
    return TheoremCheck(1 - A, _zeta(sigma, rows), _zeta(sigma, spectral_norm(E)))


def split_by_data(tau: Tensor, V_d: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the best :math:`T_0 = \tau V_d V_d^\top` for the data's subspace, and :math:`E = \tau
    - T_0`.
    """
    T_0 = (tau @ V_d) @ V_d.mT
    return T_0, tau - T_0


def corollary_bound(D: Tensor, C: Tensor, V_hat: Tensor) -> tuple[float, float]:
    r"""Return both sides of Corollary 1 (Section 4.2), divided by the number of inputs, for
    :math:`D = \rho - \tau`.

    .. math:: \operatorname{tr}(D C D^\top)
        \le 2 \lambda_{\max}(C) \|D \hat V\|_F^2 + 2 \|D\|_2^2 \operatorname{tr}((I - \hat V \hat
        V^\top) C)

    The second term is what the proof needs where the paper has :math:`2 \sigma_1(X)^2 r_d \zeta^2
    \|D\|_2^2`, and is finite where the theorem's condition fails. D is ``(d_o, d_i)``, C ``(d_i,
    d_i)``, V_hat ``(d_i, r_v)``.
    """
    largest = top_eigenvectors(C, 1)
    lambda_max = float(((C @ largest) * largest).sum())
    left_out = float(C.trace() - ((C @ V_hat) * V_hat).sum())
    bound = 2 * lambda_max * float((D @ V_hat).square().sum()) + 2 * spectral_norm(D) ** 2 * max(
        left_out, 0.0
    )
    return float(mean_square(D, C)), bound


def spectral_norm(X: Tensor) -> float:
    if X.shape[-1] > X.shape[-2]:
        X = X.mT
    return float(torch.linalg.vector_norm(X @ top_eigenvectors(gram_matrix(X), 1)))


def _zeta(sigma: float, error: float) -> float:
    return error / (sigma - error) if sigma > error else math.inf
