"""Order-free methods that keep running sums."""

from typing import ClassVar

import torch
from torch import Tensor

from .base import State
from .options import ScaleConfig, SumConfig, WudiConfig
from .order_free import OrderFree, map_spectrum
from .task_vector import TaskVector


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

    def state_shapes(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        return {"sum": (d_o, d_i)}

    def accumulate(self, state: State, task: TaskVector) -> State:
        return {**state, "sum": state["sum"].double() + task.matrix}

    def merged_update(self, state: State, scale: float) -> Tensor:
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

    def merged_update(self, state: State, scale: float) -> Tensor:
        return map_spectrum(state["sum"], lambda sigma: (scale * sigma.mean()).expand_as(sigma))


class WudiSums(OrderFree):
    r"""The minimum of WUDI's loss :math:`\sum_t \|(X - \tau_t)\,\tau_t^\top\|_F^2 / w_t`,
    :math:`w_t = \|\tau_t\|_F^2`.

    With a ridge it is :math:`X = \lambda\, R\,(M + \varepsilon\,\bar\mu I)^{-1}`. The ``moments``
    are :math:`M = \sum_t \tau_t^\top \tau_t / w_t` with the mean eigenvalue :math:`\bar\mu`, and
    the ``targets`` are :math:`R = \sum_t \tau_t \tau_t^\top \tau_t / w_t`.
    """

    name = "wudi_sums"
    label = "WUDI (running sums)"
    citation = (
        "the minimum of WUDI's loss ([Cheng et al., 2025](https://arxiv.org/abs/2503.08099)) from "
        "running sums, as in SWUDI ([2606.07289](https://arxiv.org/abs/2606.07289))"
    )
    Options = WudiConfig

    options: WudiConfig

    def state_shapes(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        return {"moments": (d_i, d_i), "targets": (d_o, d_i)}

    def accumulate(self, state: State, task: TaskVector) -> State:
        tau = task.matrix.double()
        gram = tau.mT @ (tau / tau.square().sum())
        return {
            **state,
            "moments": state["moments"] + gram,
            "targets": state["targets"] + tau @ gram,
        }

    def merged_update(self, state: State, scale: float) -> Tensor:
        M = state["moments"].double()
        R = state["targets"].double()
        identity = torch.eye(len(M), dtype=M.dtype, device=M.device)
        ridge = self.options.eps * M.diagonal().mean() * identity
        # M has no negative eigenvalue, so that with any ridge Cholesky's factors exist.
        return scale * torch.cholesky_solve(R.mT, torch.linalg.cholesky(M + ridge)).mT
