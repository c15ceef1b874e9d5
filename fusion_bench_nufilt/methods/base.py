"""The interface of layer-wise merging methods, all of which `fusion_bench` and `nufilt merge` run in the same way."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusion_bench_nufilt.core.weights import Layers, LowRank, TaskLayers, check_layers, widened
from fusion_bench_nufilt.core.workers import Devices, check_devices, map_layers, working_bytes

State = dict[str, Tensor]
"""What a method keeps for a layer between two tasks: tensors by name, numbers as tensors without dimensions."""

States = Mapping[str, State]
"""The states of layers by their names."""

Report = dict[str, Any]
"""What a step did to a layer, for ``layers.csv`` and the manifest."""


class LayerMethod(ABC):
    """A method that merges every layer by itself, one task after another.

    A subclass says what it keeps of a layer (:meth:`start`), how a task changes that (:meth:`add`), and which weight
    follows from it (:meth:`weight`). A merge of many tasks calls ``add`` for each of them and ``weight`` once. All
    three must be pure functions of their arguments. The constructor takes an instance of :attr:`Options`, the names of
    all merged layers in the order of the model, and the seed of all random draws.
    """

    name: ClassVar[str]
    """The name on the command line and in YAML files."""
    label: ClassVar[str]
    """The name in titles and tables."""
    citation: str
    """What the method is and where it was published, in Markdown, for model cards."""
    Options: ClassVar[type]
    """A frozen dataclass whose fields are made by :func:`fusion_bench_nufilt.core.options.option`."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of this method that differ from those of :attr:`Options` and of
    :class:`fusion_bench_nufilt.layers.TargetConfig`."""
    state_is_weight: ClassVar[bool] = False
    """Whether the state is the merged weight alone, ``{"weight": W}``, so that nothing is kept beside the model."""
    itemsize: ClassVar[int] = 4
    """Bytes per element in its computations: 4 for float32, 8 for float64."""
    logged: ClassVar[tuple[str, ...]] = ("task_norm",)
    """Entries of the reports whose means over the layers go to a run's loggers."""

    def __init__(self, options: Any, layers: Sequence[str], seed: int = 42) -> None:
        self.options, self.layers, self.seed = options, layers, seed

    def __str__(self) -> str:
        """The method's name and all its settings."""
        return f"{self.label} ({', '.join(f'{key} {value}' for key, value in vars(self.options).items())})"

    @abstractmethod
    def start(self, layer: str, theta_0: Tensor) -> State:
        """Return the state of a layer before the first task, given its pretrained weight ``(d_o, d_i)``."""

    @abstractmethod
    def weight(self, layer: str, state: State, theta_0: Tensor) -> Tensor:
        """Return the merged weight ``(d_o, d_i)`` that follows from a state, in the dtype of ``theta_0``."""

    def add(self, layer: str, state: State, theta_0: Tensor, tau: Tensor) -> State:
        """Return the state after one more task, whose task vector ``tau`` ``(d_o, d_i)`` is float32 at least."""
        raise NotImplementedError

    def add_each(
        self, states: States, pretrained: Layers, task: TaskLayers, *, step: int, device: Devices | None = None
    ) -> Iterator[tuple[str, State, Report]]:
        """Add one task to many layers, side by side; a method that solves layers together overrides this.

        ``step`` is the number of the task in the stream, from 1. ``device`` says where to compute, by default on the
        pretrained weights' device. Yield the name, the new state and a report of each layer as it is finished.

        Raises:
            ValueError: the models do not fit or hold non-finite values; the message names the layer.
        """
        check_layers(pretrained, pretrained, model="pretrained")
        check_layers(pretrained, task, model="task")
        where = check_devices(device or next((weight.device for weight in pretrained.values()), "cpu"))[0]

        @torch.no_grad()
        def add(layer: str) -> tuple[str, State, Report]:
            begin = time.perf_counter()
            theta_0, new = pretrained[layer].to(where), task[layer].to(where)
            tau = widened(new.product()) if isinstance(new, LowRank) else widened(new) - widened(theta_0)
            before = {name: value.to(where) for name, value in states[layer].items()}
            after = self.add(layer, before, theta_0, tau)
            report = {
                "shape": tuple(theta_0.shape),
                "seconds": time.perf_counter() - begin,
                "task_norm": torch.linalg.vector_norm(tau).item(),
                **{name: value.item() for name, value in after.items() if value.ndim == 0},
            }
            home = pretrained[layer].device
            return layer, {name: value.to(home) for name, value in after.items()}, report

        yield from map_layers(add, list(states), where)

    def weigh_each(
        self, states: States, pretrained: Layers, *, device: Devices | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged weight of each layer, side by side; the arguments are those of :meth:`add_each`."""
        where = check_devices(device or next((weight.device for weight in pretrained.values()), "cpu"))[0]

        @torch.no_grad()
        def weigh(layer: str) -> tuple[str, Tensor]:
            theta_0, state = pretrained[layer], {name: value.to(where) for name, value in states[layer].items()}
            return layer, self.weight(layer, state, theta_0.to(where)).to(theta_0.device)

        yield from map_layers(weigh, list(states), where)

    def warning(self, shapes: Sequence[tuple[int, int]]) -> str | None:
        """Return a warning if the options are doubtful for layers of these shapes ``(d_o, d_i)``."""
        return None

    def flops(self, shape: tuple[int, ...], ranks: Sequence[int | None]) -> float:
        """Estimate the floating-point operations that a layer takes, for the forecast of a merge's time.

        ``ranks`` has one entry for each task merged into the layer: the rank of its LoRA, or None for a full model.
        """
        d_o, d_i = shape
        return 2.0 * d_o * d_i * min(d_o, d_i) * (1 + len(ranks))

    def working_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Return the most bytes that a layer takes while it is merged, beside its weights and its state."""
        return working_bytes(shape, itemsize)

    @property
    def takes_first_whole(self) -> bool:
        """Whether the first task is taken as it is, which costs next to nothing."""
        return False


def variant(method: type[LayerMethod], name: str, **defaults: Any) -> type[LayerMethod]:
    """Return a method under a name of its own, with other defaults."""
    return type(name, (method,), {"name": name, "defaults": {**method.defaults, **defaults}})
