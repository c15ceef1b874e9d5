"""The interface of layer-wise merging methods, all of which `fusion_bench` and `nufilt merge` run
in the same way.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fusion_bench_nufilt.models.names import last_block_numbers
from fusion_bench_nufilt.nufilt.fusion import Layers, TaskLayers, check_layers
from fusion_bench_nufilt.nufilt.step import LowRank, clock
from fusion_bench_nufilt.utils.devices import Devices, check_devices, map_on_devices
from fusion_bench_nufilt.utils.failures import solve_alone
from fusion_bench_nufilt.utils.options import EntryPoint
from fusion_bench_nufilt.utils.tensors import widened

_R = TypeVar("_R")

State = dict[str, Tensor]
"""What a method keeps for a layer between two tasks: tensors by name, numbers as tensors without
dimensions.
"""

States = Mapping[str, State]
"""The states of layers by their names."""

Report = dict[str, Any]
"""What a step did to a layer, for ``layers.csv`` and the manifest."""

Added = tuple[str, State, Report]
"""The name, the new state and a report of a layer."""


class LayerMethod(ABC):
    """A method that merges every layer by itself, one task after another.

    A subclass says what it keeps of a layer (:meth:`start`), how a task changes that (:meth:`add`),
    and which weight follows from it (:meth:`weight`). A merge of many tasks calls ``add`` for each
    of them and ``weight`` once. All three must be pure functions of their arguments. The
    constructor takes an instance of :attr:`Options`, the names of all merged layers in the order of
    the model, the seed of all random draws, and the number of the last block of each stack of
    blocks that the model has (by default, that the layers have).
    """

    name: ClassVar[str]
    """The name on the command line and in YAML files."""
    label: ClassVar[str]
    """The name in titles and tables."""
    citation: str
    """What the method is and where it was published, in Markdown, for model cards."""
    Options: ClassVar[type]
    """A frozen dataclass whose fields are made by :func:`fusion_bench_nufilt.utils.options.option`.
    """
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of this method that differ from those of :attr:`Options` and of
    :class:`fusion_bench_nufilt.models.TargetConfig`."""
    state_is_weight: ClassVar[bool] = False
    """Whether the state is the merged weight alone, ``{"weight": W}``, so that nothing is kept
    beside the model.
    """
    itemsize: ClassVar[int] = 4
    """Bytes per element in its computations: 4 for float32, 8 for float64."""
    takes_factors: ClassVar[bool] = False
    """Whether :meth:`add` also takes a task vector as its factors, a ``LowRank``."""
    weighs_tasks: ClassVar[bool] = False
    """Whether :meth:`add` also takes the ``strength`` of the whole task, see :mod:`.strength`."""
    logged: ClassVar[tuple[str, ...]] = ("task_norm",)
    """Entries of the reports whose means over the layers go to a run's loggers."""

    def __init__(
        self,
        options: Any,
        layers: Sequence[str],
        seed: int = 42,
        last_blocks: Mapping[str | None, int] | None = None,
    ) -> None:
        self.options, self.layers, self.seed = options, layers, seed
        self.last_blocks = last_blocks or last_block_numbers(layers)

    def __str__(self) -> str:
        """The method's name and all its settings."""
        return (
            f"{self.label} "
            f"({', '.join(f'{key} {value}' for key, value in vars(self.options).items())})"
        )

    @abstractmethod
    def start(self, layer: str, theta_0: Tensor) -> State:
        """Return the state of a layer before the first task, given its pretrained weight ``(d_o,
        d_i)``.
        """

    @abstractmethod
    def weight(self, layer: str, state: State, theta_0: Tensor) -> Tensor:
        """Return the merged weight ``(d_o, d_i)`` that follows from a state, in the dtype of
        ``theta_0``.
        """

    def add(self, layer: str, state: State, theta_0: Tensor, tau: Tensor) -> State:
        """Return the state after one more task, whose task vector ``tau`` ``(d_o, d_i)`` is float32
        at least.
        """
        raise NotImplementedError

    def add_each(
        self,
        states: States,
        pretrained: Layers,
        task: TaskLayers,
        *,
        step: int,
        device: Devices | None = None,
        strength: float = 1.0,
    ) -> Iterator[Added]:
        """Add one task to many layers, side by side; a method that solves layers together overrides
        this.

        ``step`` is the number of the task in the stream, from 1, and ``strength`` that of the whole
        task. ``device`` says where to compute, by default on the pretrained weights' device; of
        several devices, each takes the next layer when it is free. Yield the name, the new state
        and a report of each layer as it is finished.

        Raises:
            ValueError: the models do not fit or hold non-finite values, or a layer can't be solved
                on its device; the message names the layer.
        """
        check_layers(pretrained, pretrained, model="pretrained")
        check_layers(pretrained, task, model="task")
        about_task = {"strength": strength} if self.weighs_tasks else {}

        def add(layer: str, where: torch.device, exact: bool = False) -> Added:
            begin = clock(where)
            home = pretrained[layer].device
            theta_0, new = pretrained[layer].to(where), task[layer].to(where)
            state = _moved(states[layer], where, exact)
            if exact:
                new = new.double()
            tau: Any
            if not isinstance(new, LowRank):
                tau = widened(new) - widened(theta_0)
            elif self.takes_factors:
                tau = new
            else:
                tau = widened(new.product())
            after = self.add(layer, state, theta_0, tau, **about_task)
            if exact:
                after = {name: after[name].to(states[layer][name].dtype) for name in after}
            report = {
                "shape": tuple(theta_0.shape),
                "seconds": clock(where) - begin,
                "task_norm": (
                    tau.norm() if isinstance(tau, LowRank) else torch.linalg.vector_norm(tau)
                ).item(),
                **{name: value.item() for name, value in after.items() if value.ndim == 0},
            }
            return layer, _moved(after, home), report

        yield from _solve_each(add, states, pretrained, device)

    def weigh_each(
        self, states: States, pretrained: Layers, *, device: Devices | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged weight of each layer, side by side; the arguments are those of
        :meth:`add_each`.
        """

        def weigh(layer: str, where: torch.device, exact: bool = False) -> tuple[str, Tensor]:
            theta_0 = pretrained[layer]
            state = _moved(states[layer], where, exact)
            weight = self.weight(layer, state, theta_0.to(where))
            return layer, weight.to(theta_0.device, theta_0.dtype)

        if self.state_is_weight:
            yield from ((layer, state["weight"]) for layer, state in states.items())
        else:
            yield from _solve_each(weigh, states, pretrained, device)

    def warning(self, shapes: Sequence[tuple[int, int]], entry_point: EntryPoint) -> str | None:
        """Return a warning if the options are doubtful for layers of these shapes ``(d_o, d_i)``,
        with others as they are typed at the entry point.
        """
        return None

    def working_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Return the most bytes that a layer takes while it is merged, beside its weights and its
        state.
        """
        return itemsize * (5 * math.prod(shape) + 10 * min(shape) ** 2)

    def solved_together(self, shape: tuple[int, ...], itemsize: int, where: torch.device) -> int:
        """Return how many layers of a shape are solved together on a device."""
        return 1


def variant(method: type[LayerMethod], name: str, **defaults: Any) -> type[LayerMethod]:
    """Return a method under a name of its own, with other defaults."""
    return type(name, (method,), {"name": name, "defaults": {**method.defaults, **defaults}})


def _moved(state: State, where: torch.device, exact: bool = False) -> State:
    """Return a state on a device, in float64 if ``exact``."""
    moved = {name: value.to(where) for name, value in state.items()}
    if exact:
        for name, value in moved.items():
            if value.is_floating_point():
                moved[name] = value.double()
    return moved


def _solve_each(
    solve: Callable[..., _R],
    states: States,
    pretrained: Layers,
    device: Devices | None,
) -> Iterator[_R]:
    """Call ``solve(layer, device)`` for all layers, and again where a solver fails: on the CPU, and
    there with ``exact``, in float64.
    """
    cpu = torch.device("cpu")

    @torch.no_grad()
    def solve_on(layer: str, where: torch.device) -> _R:
        attempts = [(str(where), partial(solve, layer, where))]
        if where != cpu:
            attempts.append(("the CPU", partial(solve, layer, cpu)))
        attempts.append(("float64 on the CPU", partial(solve, layer, cpu, exact=True)))
        return solve_alone(f"'{layer}' {tuple(pretrained[layer].shape)}", where, attempts)

    devices = check_devices(
        device or next((weight.device for weight in pretrained.values()), "cpu")
    )
    yield from map_on_devices(solve_on, list(states), devices)
