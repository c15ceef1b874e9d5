"""Order-free methods that keep running sums."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fusion_bench_nufilt.core.subspace import gram_matrix, top_eigenvectors

from .base import State
from .order_free import OrderFree, ScaleConfig, map_spectrum, option
from .task_vector import TaskVector


@dataclass(frozen=True)
class SumConfig(ScaleConfig):
    """The settings of task arithmetic on the running sum."""

    scale: float = option(0.3, "Strength of the merged update.", symbol="λ")


@dataclass(frozen=True)
class RidgeConfig(ScaleConfig):
    """The settings of a method that solves a ridge problem."""

    eps: float = option(
        0.1,
        "Ridge of the least-squares problem, over the mean eigenvalue of its matrix.",
        symbol="ε",
    )


@dataclass(frozen=True)
class WudiConfig(RidgeConfig):
    """The settings of WUDI in closed form."""

    filter: Literal["ridge", "spectral"] = option(
        "ridge",
        "Against faint directions: ridge damps them by eps, spectral cuts them off at the "
        "effective rank.",
    )


class Sum(OrderFree):
    r"""Task arithmetic, :math:`X = \lambda \sum_t \tau_t`, with a strength that may grow with
    depth.
    """

    name = "sum"
    label = "task arithmetic (running sum)"
    citation = (
        "task arithmetic ([Ilharco et al., ICLR 2023](https://arxiv.org/abs/2212.04089)) on the "
        "running sum"
    )
    Options: ClassVar[type] = SumConfig

    def sums(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        return {"sum": (d_o, d_i)}

    def gather(self, state: State, task: TaskVector) -> State:
        return {**state, "sum": state["sum"].double() + task.matrix}

    def update(self, state: State, scale: float) -> Tensor:
        return scale * state["sum"].double()


class Isotropic(Sum):
    r"""Iso-C (Marczak et al., 2025) on the running sum: every direction has the mean strength.

    :math:`X = \lambda\, \bar\sigma\, U_S V_S^\top`, where :math:`S = U_S \sigma V_S^\top` is the
    sum of the tasks.
    """

    name = "isotropic"
    label = "Iso-C (running sum)"
    citation = (
        "isotropic merging, Iso-C ([Marczak et al., 2025](https://arxiv.org/abs/2502.04959)), on "
        "the running sum"
    )
    Options = ScaleConfig

    def update(self, state: State, scale: float) -> Tensor:
        return map_spectrum(state["sum"], lambda sigma: (scale * sigma.mean()).expand_as(sigma))


class WudiSums(OrderFree):
    r"""The minimum of WUDI's loss :math:`\sum_t \|(X - \tau_t)\,\tau_t^\top\|_F^2 / w_t`,
    :math:`w_t = \|\tau_t\|_F^2`.

    With a ridge it is :math:`X = \lambda\, R\,(M + \varepsilon\,\bar\mu I)^{-1}`. The ``moments``
    are :math:`M = \sum_t \tau_t^\top \tau_t / w_t` with the mean eigenvalue :math:`\bar\mu`, and
    the ``targets`` are :math:`R = \sum_t \tau_t \tau_t^\top \tau_t / w_t`. With the spectral filter
    it is :math:`X = \lambda\, R\,M_K^+`, where :math:`M_K` has only the K strongest eigenvectors of
    M, with the effective rank :math:`K = (\sum_j \mu_j)^2 / \sum_j \mu_j^2` of its eigenvalues,
    rounded up.
    """

    name = "wudi_sums"
    label = "WUDI (running sums)"
    citation = (
        "the minimum of WUDI's loss ([Cheng et al., 2025](https://arxiv.org/abs/2503.08099)) from "
        "running sums, as in "
        "SWUDI ([2606.07289](https://arxiv.org/abs/2606.07289))"
    )
    Options = WudiConfig

    options: WudiConfig

    def sums(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        return {"moments": (d_i, d_i), "targets": (d_o, d_i)}

    def gather(self, state: State, task: TaskVector) -> State:
        tau = task.matrix.double()
        gram = tau.mT @ (tau / tau.square().sum())
        return {
            **state,
            "moments": state["moments"] + gram,
            "targets": state["targets"] + tau @ gram,
        }

    def update(self, state: State, scale: float) -> Tensor:
        M, R = state["moments"].double(), state["targets"].double()
        if self.options.filter == "spectral":
            mu, Q = torch.linalg.eigh(M)
            K = math.ceil(
                mu.sum() ** 2 / mu.square().sum() - 1e-6
            )  # of equal eigenvalues, none is cut off
            mu, Q = mu[-K:], Q[:, -K:]
            return scale * (R @ Q / mu) @ Q.mT
        ridge = (
            self.options.eps
            * M.diagonal().mean()
            * torch.eye(len(M), dtype=M.dtype, device=M.device)
        )
        return scale * torch.cholesky_solve(R.mT, torch.linalg.cholesky(M + ridge)).mT


class Sylvester(OrderFree):
    r"""Two-sided least squares.

    It minimises :math:`\sum_t \|D_t^{1/2} (X - \tau_t)\|_F^2 + \|(X - \tau_t)\, E_t^{1/2}\|_F^2`
    with a ridge, where :math:`D_t = U_t d_t U_t^\top` and :math:`E_t = V_t d_t V_t^\top` weigh the
    directions of a task by their strength. With C and G their sums, ``left`` and ``right``, and the
    ``targets`` :math:`R = 2 \sum_t U_t d_t s_t V_t^\top`, X is the solution of the Sylvester
    equation :math:`C X + X G + \varepsilon\,(\bar\gamma_C + \bar\gamma_G) X = R`, in which
    :math:`\bar\gamma` are the mean eigenvalues.
    """

    name = "sylvester"
    label = "two-sided least squares"
    citation = (
        "two-sided least squares from running sums, an unpublished method of fusion-bench-nufilt"
    )
    Options = RidgeConfig

    options: RidgeConfig

    def sums(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        return {"left": (d_o, d_o), "right": (d_i, d_i), "targets": (d_o, d_i)}

    def gather(self, state: State, task: TaskVector) -> State:
        tau = task.matrix.double()
        left, right = weights_of_directions(tau)
        new = {"left": left, "right": right, "targets": 2 * tau @ right}
        return {**state, **{name: state[name] + value for name, value in new.items()}}

    def update(self, state: State, scale: float) -> Tensor:
        c, P = torch.linalg.eigh(state["left"].double())
        g, Q = torch.linalg.eigh(state["right"].double())
        denominators = (
            c.clamp_min(0)[:, None] + g.clamp_min(0) + self.options.eps * (c.mean() + g.mean())
        )
        return scale * (P @ (P.mT @ state["targets"].double() @ Q / denominators) @ Q.mT)


def weights_of_directions(tau: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return :math:`U d U^\top` and :math:`V d V^\top` with :math:`d = (s / s_1)^6`, from the
    smaller Gram matrix.
    """
    if tau.shape[0] < tau.shape[1]:
        right, left = weights_of_directions(tau.mT)
        return left, right
    gram = gram_matrix(tau)
    s_1 = torch.linalg.vector_norm(tau @ top_eigenvectors(gram, 1))
    squares, unit = gram / s_1**2, tau / s_1
    fourth = squares @ squares
    return unit @ fourth @ unit.mT, fourth @ squares
