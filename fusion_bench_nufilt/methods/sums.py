"""Order-free methods whose state is one or a few running sums."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import State
from .order_free import ScaleConfig, Scaled, map_spectrum, option

_POWER = 3  # how strongly `sylvester` prefers a task's leading directions: they weigh (s / s_1)^(2 * 3)


@dataclass(frozen=True)
class SumConfig(ScaleConfig):
    """The settings of task arithmetic on the running sum."""

    scale: float = option(0.3, "Strength of the merged update.", symbol="λ")


@dataclass(frozen=True)
class RidgeConfig(ScaleConfig):
    """The settings of a method that solves a ridge problem."""

    eps: float = option(0.1, "Ridge of the least-squares problem, over the mean eigenvalue of its matrix.", symbol="ε")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("eps")


class Sum(Scaled):
    r"""Task arithmetic, :math:`X = \lambda \sum_t \tau_t`, with a strength that may grow with depth."""

    name = "sum"
    label = "task arithmetic (running sum)"
    citation = "task arithmetic ([Ilharco et al., ICLR 2023](https://arxiv.org/abs/2212.04089)) on the running sum"
    Options: ClassVar[type[ScaleConfig]] = SumConfig

    def sums(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        return {"sum": (d_o, d_i)}

    def gather(self, state: State, tau: Tensor) -> State:
        return {**state, "sum": state["sum"] + tau}

    def update(self, state: State, scale: float) -> Tensor:
        return scale * state["sum"]


class Isotropic(Sum):
    r"""Iso-C (Marczak et al., 2025) on the running sum: every direction has the mean strength.

    :math:`X = \lambda\, \bar\sigma\, U_S V_S^\top`, where :math:`S = U_S \sigma V_S^\top` is the sum of the tasks.
    """

    name = "isotropic"
    label = "Iso-C (running sum)"
    citation = "isotropic merging, Iso-C ([Marczak et al., 2025](https://arxiv.org/abs/2502.04959)), on the running sum"
    Options = ScaleConfig

    def update(self, state: State, scale: float) -> Tensor:
        return map_spectrum(state["sum"], lambda sigma: (scale * sigma.mean()).expand_as(sigma))


class WudiSums(Scaled):
    """The minimum of WUDI's loss, see :func:`least_squares`."""

    name = "wudi_sums"
    label = "WUDI (running sums)"
    citation = (
        "the minimum of WUDI's loss ([Cheng et al., 2025](https://arxiv.org/abs/2503.08099)) from running sums, as in "
        "SWUDI ([2606.07289](https://arxiv.org/abs/2606.07289))"
    )
    Options = RidgeConfig

    options: RidgeConfig

    def sums(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        return {"moments": (d_i, d_i), "targets": (d_o, d_i)}

    def gather(self, state: State, tau: Tensor) -> State:
        gram = tau.mT @ (tau / tau.square().sum())
        return {**state, "moments": state["moments"] + gram, "targets": state["targets"] + tau @ gram}

    def update(self, state: State, scale: float) -> Tensor:
        return scale * least_squares(state["targets"], state["moments"], self.options.eps)


class Sylvester(Scaled):
    """Two-sided least squares, see :func:`two_sided_least_squares`."""

    name = "sylvester"
    label = "two-sided least squares"
    citation = "two-sided least squares from running sums, an unpublished method of fusion-bench-nufilt"
    Options = RidgeConfig

    options: RidgeConfig

    def sums(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        return {"left": (d_o, d_o), "right": (d_i, d_i), "targets": (d_o, d_i)}

    def gather(self, state: State, tau: Tensor) -> State:
        unit = tau / torch.linalg.matrix_norm(tau, ord=2)
        left = torch.linalg.matrix_power(unit @ unit.mT, _POWER)
        right = torch.linalg.matrix_power(unit.mT @ unit, _POWER)
        return {
            **state,
            "left": state["left"] + left,
            "right": state["right"] + right,
            "targets": state["targets"] + 2 * tau @ right,
        }

    def update(self, state: State, scale: float) -> Tensor:
        return scale * two_sided_least_squares(state["left"], state["right"], state["targets"], self.options.eps)


def least_squares(R: Tensor, M: Tensor, eps: float) -> Tensor:
    r"""Return :math:`X = R\,(M + \varepsilon\,\bar\mu I)^{-1}`, which minimises
    :math:`\sum_t \|(X - \tau_t)\,\tau_t^\top\|_F^2 / w_t` with a ridge.

    That is WUDI's loss (Cheng et al., 2025), whose closed form is SWUDI (arXiv 2606.07289).

    Args:
        R: :math:`\sum_t \tau_t \tau_t^\top \tau_t / w_t`, ``(d_o, d_i)``.
        M: :math:`\sum_t \tau_t^\top \tau_t / w_t`, ``(d_i, d_i)``, not zero.
        eps: the ridge, over the mean eigenvalue :math:`\bar\mu` of M.
    """
    ridge = eps * M.diagonal().mean() * torch.eye(len(M), dtype=M.dtype, device=M.device)
    return torch.cholesky_solve(R.mT, torch.linalg.cholesky(M + ridge)).mT


def two_sided_least_squares(C: Tensor, G: Tensor, R: Tensor, eps: float) -> Tensor:
    r"""Return the X of the Sylvester equation :math:`C X + X G + \varepsilon\,(\bar\gamma_C + \bar\gamma_G) X = R`.

    It minimises :math:`\sum_t \|D_t^{1/2} (X - \tau_t)\|_F^2 + \|(X - \tau_t)\, E_t^{1/2}\|_F^2` with a ridge, where
    :math:`D_t = U_t d_t U_t^\top` and :math:`E_t = V_t d_t V_t^\top` weigh the directions of a task by their strength.

    Args:
        C: :math:`\sum_t U_t d_t U_t^\top`, ``(d_o, d_o)``, not zero.
        G: :math:`\sum_t V_t d_t V_t^\top`, ``(d_i, d_i)``.
        R: :math:`2 \sum_t U_t d_t s_t V_t^\top`, ``(d_o, d_i)``.
        eps: the ridge, over the sum of the mean eigenvalues of C and G.
    """
    c, P = torch.linalg.eigh(C)
    g, Q = torch.linalg.eigh(G)
    denominators = c.clamp_min(0)[:, None] + g.clamp_min(0) + eps * (c.mean() + g.mean())
    return P @ (P.mT @ R @ Q / denominators) @ Q.mT
