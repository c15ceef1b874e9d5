"""How folders are merged, what a merge reads, and what it will do."""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import torch

from fusion_bench_nufilt.core.devices import check_devices
from fusion_bench_nufilt.core.options import check_choices, check_whole, option
from fusion_bench_nufilt.layers import Coverage, TargetConfig
from fusion_bench_nufilt.methods import LayerMethod
from fusion_bench_nufilt.storage.manifest import Manifest
from fusion_bench_nufilt.storage.tensors import FLOATS

from .architecture import Layer
from .checkpoint import Checkpoint
from .models import FullModel

_option = partial(option, panel="Machine")


@dataclass(frozen=True)
class Settings:
    """How folders are merged; the method has settings of its own. A value out of its range is a ValueError."""

    seed: int = _option(42, "Seed of the adapters' initialisation.", panel="Method")
    step: int | None = _option(
        None,
        "Number of the first task in the stream, from 1. If it is not given, it is one more than the manifest of the "
        "merged folder says, and 1 without a merged folder.",
    )
    accumulate: Literal["stored", "float32"] = _option(
        "stored",
        "What the merged layers are kept in between steps: stored means the base's dtype; float32 also writes them "
        "beside the model for the next merge, so that rounding does not add up.",
    )
    device: str = _option(
        "cpu",
        "Where to compute: cpu works on a layer per thread; cuda, or several such as cuda:0,cuda:1, on stacks of "
        "layers.",
    )
    max_memory: int | None = _option(
        None, "The most memory to hold, such as 4GB; fewer layers are then worked on at a time."
    )

    engine: Literal["local", "ray"] = _option(
        "local",
        "What computes the layers: local is this process; ray is a worker on every node of a Ray cluster, or on every "
        "GPU of it if device is cuda. This process alone writes, and the result is the same.",
    )
    address: str | None = _option(
        None,
        "Address of the Ray cluster, such as auto or 10.0.0.1:6379. If it is not given, it is the cluster that this "
        "machine belongs to, or else a new one on this machine alone.",
    )

    def __post_init__(self) -> None:
        if self.step is not None:
            check_whole(self, "step", least=1, most=10**6)
        if self.max_memory is not None:
            check_whole(self, "max_memory", least=1, most=2**62)
        check_choices(self)
        if self.engine == "local":  # a cluster's workers have devices of their own
            check_devices(self.device)
            if self.address is not None:
                raise ValueError(f"address '{self.address}' is for engine=ray")
        elif self.device not in ("cpu", "cuda"):
            raise ValueError(f"device '{self.device}': engine=ray gives every worker a GPU by itself; say cuda, or cpu")

    @property
    def devices(self) -> list[torch.device]:
        """The devices that compute, all of one kind."""
        return [torch.device(name) for name in self.device.split(",")]

    @property
    def on_cpu(self) -> bool:
        """Whether layers are computed in this memory."""
        return self.devices[0].type == "cpu"

    @property
    def workers(self) -> int:
        """The number of batches of layers that this process works on at a time."""
        return torch.get_num_threads() if self.on_cpu else len(self.devices)


@dataclass
class Plan:
    """A merge whose models passed the checks on their headers."""

    pretrained: FullModel
    merged: FullModel | None  # what is merged so far; None means the base
    state: FullModel | None  # what the method kept of the layers beside `merged`
    tasks: list[FullModel]
    layers: list[Layer]  # merged by the method, in the base's order
    others: dict[str, tuple[str, ...]]  # the base's keys of every other tensor, by slot
    coverage: Coverage  # how much of the model the layers are
    origin: str  # where the layers are known from
    method: LayerMethod
    targets: TargetConfig
    settings: Settings
    before: Manifest  # of what is merged so far; empty if it has none
    warnings: list[str] = field(default_factory=list)

    @cached_property
    def averaged(self) -> set[str]:
        """The slots of ``others`` that the tasks change."""
        which = self.targets.other_params
        changed = which == "mean" or (which == "first" and self.first_step == 1)
        return {slot for slot, keys in self.others.items() if changed and self.base.tensors[keys[0]].dtype in FLOATS}

    @property
    def base(self) -> Checkpoint:
        """The base's checkpoint, whose tensors, files and headers the result has."""
        return self.pretrained.checkpoint

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints of all models, the base's first."""
        models = (self.pretrained, self.merged, self.state, *self.tasks)
        return [model.checkpoint for model in models if model is not None]

    def changed(self) -> list[str]:
        """Return the names of the models whose weights were written to since they were opened."""
        return [checkpoint.name for checkpoint in self.checkpoints if checkpoint.changed()]

    @property
    def names(self) -> list[str]:
        """The names of all tasks in the result, in merging order."""
        return [*self.before.get("tasks", []), *(task.checkpoint.label for task in self.tasks)]

    @property
    def first_step(self) -> int:
        """The number of the first task in the stream, from 1."""
        return self.settings.step or self.before.get("step", 0) + 1

    @property
    def last_step(self) -> int:
        """The number of tasks that the result holds."""
        return self.first_step + len(self.tasks) - 1

    def dtype(self, layer: Layer) -> torch.dtype:
        """Return the base's dtype of a layer."""
        return FLOATS[self.base.tensors[layer.keys[0]].dtype]

    def options(self) -> dict[str, Any]:
        """Return all options of the merge by name, the method's among them."""
        return {
            "method": self.method.name,
            **dataclasses.asdict(self.method.options),
            **dataclasses.asdict(self.targets),
            **{key: getattr(self.settings, key) for key in ("seed", "accumulate", "device")},
        }
