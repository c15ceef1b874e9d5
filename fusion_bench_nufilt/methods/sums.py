"""Order-free methods that keep running sums or the tasks' leading directions, and the mean of two methods."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusion_bench_nufilt.core.subspace import gram_matrix, top_eigenvectors

from .base import State
from .order_free import AutoScaleConfig, OrderFree, RampConfig, ScaleConfig, map_spectrum, option, polar_factor
from .spectral import Spectral, SpectralConfig
from .task_vector import Directions, TaskVector


@dataclass(frozen=True)
class SumConfig(ScaleConfig):
    """The settings of task arithmetic on the running sum."""

    scale: float = option(0.3, "Strength of the merged update.", symbol="λ")


@dataclass(frozen=True)
class RidgeConfig(ScaleConfig):
    """The settings of a method that solves a ridge problem."""

    eps: float = option(0.1, "Ridge of the least-squares problem, over the mean eigenvalue of its matrix.", symbol="ε")


class Sum(OrderFree):
    r"""Task arithmetic, :math:`X = \lambda \sum_t \tau_t`, with a strength that may grow with depth."""

    name = "sum"
    label = "task arithmetic (running sum)"
    citation = "task arithmetic ([Ilharco et al., ICLR 2023](https://arxiv.org/abs/2212.04089)) on the running sum"
    Options: ClassVar[type] = SumConfig

    def sums(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        return {"sum": (d_o, d_i)}

    def gather(self, state: State, task: TaskVector) -> State:
        return {**state, "sum": state["sum"].double() + task.matrix}

    def update(self, state: State, scale: float) -> Tensor:
        return scale * state["sum"].double()


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


class WudiSums(OrderFree):
    r"""The minimum of WUDI's loss :math:`\sum_t \|(X - \tau_t)\,\tau_t^\top\|_F^2 / w_t`, :math:`w_t = \|\tau_t\|_F^2`.

    With a ridge it is :math:`X = \lambda\, R\,(M + \varepsilon\,\bar\mu I)^{-1}`. The ``moments`` are
    :math:`M = \sum_t \tau_t^\top \tau_t / w_t` with the mean eigenvalue :math:`\bar\mu`, and the ``targets`` are
    :math:`R = \sum_t \tau_t \tau_t^\top \tau_t / w_t`.
    """

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

    def gather(self, state: State, task: TaskVector) -> State:
        tau = task.matrix.double()
        gram = tau.mT @ (tau / tau.square().sum())
        return {**state, "moments": state["moments"] + gram, "targets": state["targets"] + tau @ gram}

    def update(self, state: State, scale: float) -> Tensor:
        M, R = state["moments"].double(), state["targets"].double()
        ridge = self.options.eps * M.diagonal().mean() * torch.eye(len(M), dtype=M.dtype, device=M.device)
        return scale * torch.cholesky_solve(R.mT, torch.linalg.cholesky(M + ridge)).mT


class Sylvester(OrderFree):
    r"""Two-sided least squares.

    It minimises :math:`\sum_t \|D_t^{1/2} (X - \tau_t)\|_F^2 + \|(X - \tau_t)\, E_t^{1/2}\|_F^2` with a ridge, where
    :math:`D_t = U_t d_t U_t^\top` and :math:`E_t = V_t d_t V_t^\top` weigh the directions of a task by their strength.
    With C and G their sums, ``left`` and ``right``, and the ``targets`` :math:`R = 2 \sum_t U_t d_t s_t V_t^\top`, X is
    the solution of the Sylvester equation :math:`C X + X G + \varepsilon\,(\bar\gamma_C + \bar\gamma_G) X = R`, in
    which :math:`\bar\gamma` are the mean eigenvalues.
    """

    name = "sylvester"
    label = "two-sided least squares"
    citation = "two-sided least squares from running sums, an unpublished method of fusion-bench-nufilt"
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
        denominators = c.clamp_min(0)[:, None] + g.clamp_min(0) + self.options.eps * (c.mean() + g.mean())
        return scale * (P @ (P.mT @ state["targets"].double() @ Q / denominators) @ Q.mT)


def weights_of_directions(tau: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return :math:`U d U^\top` and :math:`V d V^\top` with :math:`d = (s / s_1)^6`, from the smaller Gram matrix."""
    if tau.shape[0] < tau.shape[1]:
        right, left = weights_of_directions(tau.mT)
        return left, right
    gram = gram_matrix(tau)
    s_1 = torch.linalg.vector_norm(tau @ top_eigenvectors(gram, 1))
    squares, unit = gram / s_1**2, tau / s_1
    fourth = squares @ squares
    return unit @ fourth @ unit.mT, fourth @ squares


class TsvStream(OrderFree):
    r"""TSV-M, task singular vectors (Gargiulo et al., CVPR 2025), of the tasks that have arrived.

    With ``k = min(d_o, d_i)``, each of T tasks keeps its k // T leading directions, and
    :math:`X = \lambda\, \mathrm{polar}([U_1 \dots U_T])\, \mathrm{diag}(s)\, \mathrm{polar}([V_1 \dots V_T])^\top`.
    A new task shortens the lists of all earlier ones, so that the state, ``left`` ``(d_o, k)``, ``values`` ``(k,)`` and
    ``right`` ``(d_i, k)``, has at most the size of two models; its columns beyond T (k // T) are zero, and so are those
    that a task of lower rank lacks. Directions are rounded to float16 once, as they arrive.
    """

    name = "tsv_stream"
    label = "TSV-M (stream)"
    citation = "TSV-M ([Gargiulo et al., CVPR 2025](https://arxiv.org/abs/2412.00081)), one task after another"
    Options = AutoScaleConfig
    directions = ("left", "right")

    def sums(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        k = min(d_o, d_i)
        return {"left": (d_o, k), "values": (k,), "right": (d_i, k)}

    def gather(self, state: State, task: TaskVector) -> State:
        tasks, k, kept = int(state["count"]), len(state["values"]), dict(state)
        share, share_before = k // tasks, k // max(1, tasks - 1)
        for name, new in task.directions(share)._asdict().items():
            starts = range(0, (tasks - 1) * share_before, max(1, share_before))
            earlier = [state[name][..., start : start + share] for start in starts]
            columns = torch.cat([*earlier, new.to(state[name].dtype)], dim=-1)
            kept[name] = pad(columns, (0, k - columns.shape[-1]))
        return kept

    def leading(self, state: State) -> Directions:
        return Directions(state["left"], state["values"], state["right"])

    def update(self, state: State, scale: float) -> Tensor:
        s = state["values"]
        if not s.any():
            return torch.zeros(len(state["left"]), len(state["right"]), dtype=s.dtype, device=s.device)
        left, right = (polar_factor(state[side][:, s > 0].to(s.dtype)) for side in self.directions)
        return scale * left * s[s > 0] @ right.mT


MEMBERS: dict[str, tuple[type[OrderFree], RampConfig]] = {
    "spectral": (Spectral, SpectralConfig(damp=1.0)),
    "sylvester": (Sylvester, RidgeConfig(eps=0.001)),
    "tsv_stream": (TsvStream, AutoScaleConfig(scale=1.5)),
}
"""The methods that are mixed, at the settings that were best on benchmarks (docs/notes/order_free_rule.md)."""


@dataclass(frozen=True)
class MixConfig(AutoScaleConfig):
    """The settings of a mixture of two methods."""

    pair: Literal["tsv_stream+spectral", "spectral+sylvester", "tsv_stream+sylvester"] = option(
        "tsv_stream+spectral", "The two methods whose updates are averaged."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale == "auto" and "tsv_stream" not in self.pair:
            raise ValueError(f"scale=auto needs tsv_stream in the pair, got {self.pair}: give scale a number")


class Mix(OrderFree):
    """The mean of the updates of two order-free methods, both of whose states are kept."""

    name = "mix"
    label = "mixture"
    Options = MixConfig

    def __init__(self, options: MixConfig, layers: Sequence[str], seed: int = 42) -> None:
        super().__init__(options, layers, seed)
        members = [MEMBERS[name] for name in options.pair.split("+")]
        self._members = [kind(settings, layers, seed) for kind, settings in members]
        self.directions = tuple(f"{member.name}_{name}" for member in self._members for name in member.directions)
        self.citation = f"the mean of the updates by {' and by '.join(member.citation for member in self._members)}"

    def sums(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{member.name}_{name}": shape for member in self._members for name, shape in member.sums(d_o, d_i).items()
        }

    def gather(self, state: State, task: TaskVector) -> State:
        for member in self._members:
            after = member.gather(_part_of(member, state), task)
            state = {**state, **{f"{member.name}_{name}": value for name, value in after.items()}}
        return state

    def leading(self, state: State) -> Directions:
        member = next(each for each in self._members if isinstance(each, TsvStream))
        return member.leading(_part_of(member, state))

    def update(self, state: State, scale: float) -> Tensor:
        updates = [member.update(_part_of(member, state), scale * member.scale) for member in self._members]
        return sum(updates[1:], updates[0]) / len(updates)


def _part_of(member: OrderFree, state: State) -> State:
    prefix = f"{member.name}_"
    own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return {**own, "count": state["count"]}
