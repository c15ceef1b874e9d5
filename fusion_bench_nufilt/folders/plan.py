"""What a merge reads and what it will do, as the checks left it."""

from dataclasses import dataclass

import torch

from fusion_bench_nufilt.layers import Coverage, TargetConfig
from fusion_bench_nufilt.methods import LayerMethod
from fusion_bench_nufilt.storage.manifest import Manifest
from fusion_bench_nufilt.storage.tensors import FLOATS

from .architecture import Layer
from .checkpoint import Checkpoint
from .models import FullModel, Task
from .settings import Settings


@dataclass(frozen=True)
class Models:
    """The models that a merge reads."""

    base: FullModel
    merged: FullModel | None  # what is merged so far; None means the base
    state: FullModel | None  # what the method kept of the layers beside `merged`
    tasks: list[Task]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints of all models, the base's first."""
        models = (self.base, self.merged, self.state, *self.tasks)
        return [model.checkpoint for model in models if model is not None]


@dataclass(frozen=True)
class Selection:
    """What becomes of each of the base's tensors."""

    layers: list[Layer]  # merged by the method, in the base's order
    others: dict[str, tuple[str, ...]]  # the base's keys of every other tensor, by slot
    averaged: set[str]  # the slots of `others` that the tasks change
    coverage: Coverage  # how much of the model the layers are
    origin: str  # where the layers are known from


@dataclass
class Plan:
    """A merge whose models passed the checks on their headers."""

    models: Models
    selection: Selection
    method: LayerMethod
    targets: TargetConfig
    settings: Settings
    before: Manifest  # of what is merged so far; empty if it has none
    first_step: int
    warnings: list[str]

    @property
    def base(self) -> Checkpoint:
        """The base's checkpoint, whose tensors, files and headers the result has."""
        return self.models.base.checkpoint

    @property
    def layers(self) -> list[Layer]:
        """The layers to merge, in the base's order."""
        return self.selection.layers

    @property
    def names(self) -> list[str]:
        """The names of all tasks in the result, in merging order."""
        return [*self.before.get("tasks", []), *(task.checkpoint.label for task in self.models.tasks)]

    @property
    def last_step(self) -> int:
        """The number of tasks that the result holds."""
        return self.first_step + len(self.models.tasks) - 1

    def dtype(self, layer: Layer) -> torch.dtype:
        """Return the base's dtype of a layer."""
        return FLOATS[self.base.tensors[layer.keys[0]].dtype]
