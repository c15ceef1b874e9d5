"""What the weights of checkpoint folders tell without data, layer by layer, before anything is merged."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fusion_bench_nufilt.core import LowRank
from fusion_bench_nufilt.core.dtypes import widened
from fusion_bench_nufilt.core.workers import map_layers
from fusion_bench_nufilt.folders import Plan
from fusion_bench_nufilt.folders.models import FullModel, Task

from .results import Analysis, Layer, VectorRow
from .spectra import energy_curves, overlaps, task_vector

#: Directions that are solved for in each layer: enough for the curve of the energy, few enough for 7B models.
DIRECTIONS = 32


def analyze_folders(plan: Plan, task_rank: int, on_layer: Callable[[], None] = lambda: None) -> Analysis:
    """Compare the task vectors of a planned merge, and what is merged already, with each other.

    Holds as many layers as there are threads, like the merge itself.

    Args:
        plan: models that passed the checks on their headers.
        task_rank: directions that are compared.
        on_layer: called after each layer.
    """
    for checkpoint in plan.checkpoints:
        checkpoint.fetch()
    tasks = _unique([task.checkpoint.label for task in plan.tasks])
    names = tasks if plan.merged is None else [*tasks, "merged so far"]
    models = plan.tasks if plan.merged is None else [*plan.tasks, plan.merged]
    directions = max(DIRECTIONS, task_rank)

    def examine(number: int) -> tuple[np.ndarray, list[Tensor], list[VectorRow]]:
        slot, layer = plan.layers[number].slot, layers[number]
        theta_0 = widened(plan.base.read(plan.layers[number].keys[0])[0])
        vectors = [task_vector(_update(model, slot, theta_0), directions) for model in models]
        rows = [
            VectorRow.of(name, layer, vector, theta_0, task_rank) for name, vector in zip(names, vectors, strict=True)
        ]
        return overlaps(vectors, task_rank), [vector.energy for vector in vectors], rows

    layers = []
    for each in plan.layers:
        d_o, d_i = plan.base.tensors[each.keys[0]].shape
        layers.append(Layer(each.name, (d_o, d_i)))
    found = []
    for result in map_layers(examine, range(len(layers)), torch.device("cpu")):
        found.append(result)
        on_layer()
    return Analysis(
        about={"base": plan.base.label, "tasks": tasks},
        tasks=tasks,
        layers=layers,
        task_rank=task_rank,
        vectors=[row for _, _, rows in found for row in rows],
        names=names,
        overlaps=np.stack([matrix for matrix, _, _ in found]),
        energy=energy_curves(names, [energies for _, energies, _ in found]),
    )


def _update(model: FullModel | Task, slot: str, theta_0: Tensor) -> Tensor:
    """tau of a layer; zero where an adapter leaves it as it is."""
    if slot not in model.slots:
        return torch.zeros_like(theta_0)
    weight, _ = model.weight(slot)
    return weight.product().to(theta_0) if isinstance(weight, LowRank) else weight.to(theta_0) - theta_0


def _unique(labels: Sequence[str]) -> list[str]:
    """Two folders of one name are told apart by their place."""
    return [label if labels.count(label) == 1 else f"{label} ({place})" for place, label in enumerate(labels, 1)]
