"""Analyse checkpoint folders without data, layer by layer, before anything is merged."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion_bench_nufilt.merge.plan import Plan
from fusion_bench_nufilt.models.layers import Layer
from fusion_bench_nufilt.models.model import ModelWeights
from fusion_bench_nufilt.nufilt.low_rank import LowRank
from fusion_bench_nufilt.utils.devices import map_layers
from fusion_bench_nufilt.utils.tensors import to_compute_dtype

from .subspaces import VectorSummary, task_vector
from .summary import Analysis

#: The directions computed in each layer: enough for the curve of the energy, few enough for 7B
#: models.
DIRECTIONS = 32


def analyze_folders(
    plan: Plan, task_rank: int, on_layer: Callable[[], Any] = lambda: None
) -> Analysis:
    """Compare the task vectors of a planned merge, and that of what is already merged, a few layers
    at a time.
    """
    for checkpoint in plan.checkpoints:
        checkpoint.fetch()
    labels = [task.source.label for task in plan.tasks]
    tasks = []
    for number, label in enumerate(labels, 1):
        if labels.count(label) > 1:  # folders of the same name
            label = f"{label} ({number})"
        tasks.append(label)
    models = dict(zip(tasks, plan.tasks, strict=True))
    if plan.merged is not None:
        models["merged so far"] = plan.merged
    shapes = {layer.name: layer.view.shape for layer in plan.layers}
    result = Analysis({"base": plan.base.label, "tasks": tasks}, tasks, shapes, task_rank)

    def examine(layer: Layer) -> tuple[float, dict[str, VectorSummary]]:
        stored = to_compute_dtype(plan.base.read(layer.keys[0]))
        rank = max(DIRECTIONS, task_rank)
        vectors = {}
        for name, model in models.items():
            # An adapter has factors for the layers that it changes.
            if model.entries[layer.param].rank != 0:
                vectors[name] = task_vector(_update(model, layer, stored), rank)
        return float(torch.linalg.vector_norm(layer.view.matrix(stored))), vectors

    examined = map_layers(examine, plan.layers, torch.device("cpu"))
    for layer, (size, vectors) in zip(plan.layers, examined, strict=True):
        result.add_vectors(layer.name, size, vectors)
        on_layer()
    return result


def _update(model: ModelWeights, layer: Layer, stored: Tensor) -> Tensor:
    """Return tau of a layer, ``(d_o, d_i)``, given the base's tensor."""
    theta_0 = layer.view.matrix(stored)
    weight = model.entries[layer.param].read(stored)
    if isinstance(weight, LowRank):
        return weight.product().to(theta_0)
    return layer.view.matrix(weight).to(theta_0) - theta_0
