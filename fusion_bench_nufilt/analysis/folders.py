"""What the weights of checkpoint folders tell without data, layer by layer, before anything is merged."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_bench_nufilt.core import LowRank
from fusion_bench_nufilt.core.weights import widened
from fusion_bench_nufilt.core.workers import map_layers
from fusion_bench_nufilt.folders import Plan
from fusion_bench_nufilt.folders.models import FullModel

from .results import Analysis, Layer, LayerVectors
from .spectra import task_vector

#: Directions that are solved for in each layer: enough for the curve of the energy, few enough for 7B models.
DIRECTIONS = 32


def analyze_folders(plan: Plan, task_rank: int, on_layer: Callable[[], Any] = lambda: None) -> Analysis:
    """Compare the task vectors of a planned merge, and what is merged already, with each other.

    Holds as many layers as there are threads, like the merge itself.

    Args:
        plan: models that passed the checks on their headers.
        task_rank: how many directions are compared.
        on_layer: called after each layer.
    """
    for checkpoint in plan.checkpoints:
        checkpoint.fetch()
    tasks = _unique([task.checkpoint.label for task in plan.tasks])
    names = tasks if plan.merged is None else [*tasks, "merged so far"]
    models = plan.tasks if plan.merged is None else [*plan.tasks, plan.merged]
    shapes = [plan.base.tensors[each.keys[0]].shape for each in plan.layers]
    layers = [Layer(each.name, (shape[0], shape[1])) for each, shape in zip(plan.layers, shapes, strict=True)]

    def examine(number: int) -> LayerVectors:
        planned, layer = plan.layers[number], layers[number]
        theta_0 = widened(plan.base.read(planned.keys[0])[0])
        vectors = [task_vector(_update(model, planned.slot, theta_0), max(DIRECTIONS, task_rank)) for model in models]
        return LayerVectors.of(names, layer, vectors, theta_0, task_rank)

    found = []
    for result in map_layers(examine, range(len(layers)), torch.device("cpu")):
        found.append(result)
        on_layer()
    return Analysis.of_vectors({"base": plan.base.label, "tasks": tasks}, tasks, names, layers, found, task_rank)


def _update(model: FullModel, slot: str, theta_0: Tensor) -> Tensor:
    """Return the update tau of a layer; zero where an adapter leaves the layer as it is."""
    if slot not in model.slots:
        return torch.zeros_like(theta_0)
    weight, _ = model.weight(slot)
    return weight.product().to(theta_0) if isinstance(weight, LowRank) else weight.to(theta_0) - theta_0


def _unique(labels: Sequence[str]) -> list[str]:
    """Make all labels different: two folders of one name are told apart by their numbers."""
    return [label if labels.count(label) == 1 else f"{label} ({number})" for number, label in enumerate(labels, 1)]
