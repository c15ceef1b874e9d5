"""DC-Merge from the tasks' leading directions, one task after another."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .base import State
from .order_free import ScaleConfig, option, polar_factor
from .tsv import TsvStream


@dataclass(frozen=True)
class DcMergeConfig(ScaleConfig):
    """The settings of DC-Merge."""

    smoothing: Literal["none", "mean"] = option(
        "none",
        "The strengths of a task's directions: its singular values, or for all of them their mean.",
    )


class DcMerge(TsvStream):
    r"""DC-Merge (Zhang et al., CVPR 2026), with task arithmetic, of the tasks so far.

    Each of T tasks keeps its k // T leading directions, as in TSV-M, at strengths :math:`\bar s_t`:
    their singular values, or the mean of these. With the shared bases :math:`P_U =
    \mathrm{polar}([U_1 \dots U_T])` and :math:`P_V` likewise,

    .. math:: X = \lambda\, P_U \Big( B \odot \sum_t P_U^\top U_t\, \bar s_t\, V_t^\top P_V \Big)
    P_V^\top,

    where B is 1 in T blocks on the diagonal, one for the directions of each task, and 0 elsewhere.
    """

    name = "dc_merge"
    label = "DC-Merge (stream)"
    citation = (
        "DC-Merge ([Zhang et al., CVPR 2026](https://arxiv.org/abs/2603.06242)), one task after "
        "another"
    )
    Options: ClassVar[type] = DcMergeConfig
    defaults = {**TsvStream.defaults, "ramp": 0.4}  # noqa: RUF012

    options: DcMergeConfig

    def update(self, state: State, scale: float) -> Tensor:
        s = state["values"]
        exist = s > 0
        share = max(1, self.share(len(s), int(state["count"])))
        task = (torch.arange(len(s), device=s.device) // share)[exist]
        U, V = (state[side][:, exist].to(s.dtype) for side in self.directions)
        if not len(task):
            return torch.zeros(len(U), len(V), dtype=s.dtype, device=s.device)
        same_task = (task[:, None] == task).to(s.dtype)
        s = s[exist]
        if self.options.smoothing == "mean":
            s = same_task @ s / same_task.sum(dim=1)
        P_U, P_V = polar_factor(U), polar_factor(V)
        core = (P_U.mT @ U * s) @ (V.mT @ P_V)
        return scale * P_U @ (core * same_task) @ P_V.mT
