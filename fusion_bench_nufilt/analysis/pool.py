"""The analysis of a FusionBench model pool, with the data that its task pool has."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fusion_bench_nufilt.compare.experiment import Experiment
from fusion_bench_nufilt.core.subspace import subspace_affinity
from fusion_bench_nufilt.core.weights import wide_dtype
from fusion_bench_nufilt.core.workers import map_layers
from fusion_bench_nufilt.layers import check_model, select_layers
from fusion_bench_nufilt.layers.views import View

from .affinity import Floats, affinity_by_rank, data_subspace
from .bounds import check_theorem, split_by_data
from .inputs import TaskInputs, task_inputs
from .record import Moments, known_moments, memory_of, record_moments, shared_inputs
from .results import Analysis, Layer, LayerVectors
from .settings import AnalysisConfig
from .spectra import TaskVector, task_vector

log = logging.getLogger(__name__)

RANKS = (1, 2, 4, 8, 16, 32, 64)
_THEOREM_RANKS = (1, 4, 8)
MEMORY = 4 * 10**9  # bytes of moments that are recorded at a time

Weights = dict[str, Tensor]


class PoolAnalysis:
    """A model pool under analysis. What needs data is recorded once, in ``folder / "moments"``.

    Args:
        experiment: models and data.
        name: the name of the model pool, for people.
        config: what is measured.
        folder: the folder of the results.
        target_modules: which layers, see :func:`fusion_bench_nufilt.layers.select_layers`.

    Raises:
        ValueError: the task pool lacks a task's data, or has fewer samples than r_d; a model that does not fit.
    """

    def __init__(
        self,
        experiment: Experiment,
        name: str,
        config: AnalysisConfig,
        folder: Path,
        target_modules: str | Sequence[str] = "auto",
    ) -> None:
        self.experiment, self.name, self.config, self.folder = experiment, name, config, folder
        self.tasks = experiment.tasks
        self.pretrained: nn.Module = experiment.modelpool.load_pretrained_model()
        self.layers, self.views = merged_layers(self.pretrained, target_modules)
        self.weights = layer_weights(self.pretrained, self.views)
        self.inputs = self._draw_inputs(config.samples)
        for task, inputs in self.inputs.items():
            if len(inputs) < config.data_rank:
                raise ValueError(f"task '{task}' has {len(inputs)} samples, fewer than r_d = {config.data_rank}")
        modules = [layer.module for layer in self.layers]
        self._owner = shared_inputs(self.pretrained, modules, self.inputs[self.tasks[0]])
        self.moments: dict[str, Moments] = {}

    @property
    def width(self) -> int:
        """d_i of the narrowest layer."""
        return min(layer.shape[1] for layer in self.layers)

    @property
    def memory_note(self) -> str:
        """Say how much memory and disk recording will take."""
        needed, owners = memory_of(self.pretrained, self._owner), len(set(self._owner.values()))
        return (
            f"second moments of {owners} inputs of {len(self.layers)} layers, for each of {len(self.tasks)} tasks: at "
            f"most {min(needed, MEMORY) / 1e6:.0f} MB of memory at a time, {needed / 3e6:.0f} MB on disk"
        )

    @cached_property
    def propagated_inputs(self) -> dict[str, TaskInputs]:
        """The few samples of each task for the propagated losses; none if these are switched off."""
        return self._draw_inputs(self.config.propagated, keep=True) if self.config.propagated else {}

    def load(self, task: str) -> nn.Module:
        """Load a task's model, if it can be merged."""
        model: nn.Module = self.experiment.modelpool.load_model(task)
        check_model(self.pretrained, model, {view.key for view in self.views.values()}, name=task)
        return model

    def run(self, on_task: Callable[[], Any] = lambda: None) -> Analysis:
        """Record what is not recorded yet, and compare the tasks' data with their vectors."""
        data: list[list[Tensor]] = []  # V_d by task and layer
        vectors: list[list[TaskVector]] = []  # by task and layer
        theorem: list[dict[str, Any]] = []
        for task in self.tasks:
            model = self.load(task)
            self.moments[task] = self._moments(task, model)
            data.append(self._data_subspaces(self.moments[task]))
            found = self._examine(task, layer_weights(model, self.views), data[-1])
            vectors.append([vector for vector, _ in found])
            theorem += [row for _, rows in found for row in rows]
            on_task()
        config, tasks = self.config, self.tasks
        samples = {task: {"samples": len(self.inputs[task]), "inputs": self.moments[task].tokens} for task in tasks}
        about = {"modelpool": self.name, "samples": samples, "settings": asdict(config)}
        by_layer = [
            LayerVectors.of(tasks, layer, own, self.weights[layer.name], config.task_rank)
            for layer, own in zip(self.layers, zip(*vectors, strict=True), strict=True)
        ]
        result = Analysis.of_vectors(about, tasks, tasks, self.layers, by_layer, config.task_rank)
        result.vectors.sort(key=lambda row: tasks.index(row.task))
        result.theorem = theorem
        smallest = min(min(layer.shape) for layer in self.layers)
        result.ranks = [rank for rank in RANKS if rank <= smallest]
        result.affinity, result.affinity_by_rank = self._affinities(data, vectors, result.ranks)
        return result

    def _draw_inputs(self, samples: int, *, keep: bool = False) -> dict[str, TaskInputs]:
        taskpool, seed = self.experiment.evaluator.taskpool, self.config.seed
        return {task: task_inputs(taskpool, task, samples, seed, keep=keep) for task in self.tasks}

    def _moments(self, task: str, model: nn.Module) -> Moments:
        """Return the second moments of a task's inputs, and record them unless they were recorded before."""
        source, name = (model, task) if self.config.activations == "own" else (self.pretrained, "_pretrained_")
        about = {
            "task": task,
            "activations": self.config.activations,
            "samples": len(self.inputs[task]),
            "seed": self.config.seed,
            "layers": [layer.module for layer in self.layers],
            "weights": self.experiment.digests[name],
            "taskpool": self.experiment.settings["taskpool"],
        }
        folder = self.folder / "moments" / task
        if (known := known_moments(folder, about)) is not None:
            return known
        return record_moments(source, self.inputs[task], self._owner, folder, about, MEMORY)

    def _data_subspaces(self, moments: Moments) -> list[Tensor]:
        """Return V_d for every layer; layers with the same inputs share it."""
        owners = sorted(set(self._owner.values()))

        def solve(owner: str) -> Tensor:
            return data_subspace(moments.read(owner), max(RANKS))

        solved = dict(zip(owners, map_layers(solve, owners, torch.device("cpu")), strict=True))
        return [solved[self._owner[layer.module]] for layer in self.layers]

    def _examine(
        self, task: str, weights: Weights, data: Sequence[Tensor]
    ) -> list[tuple[TaskVector, list[dict[str, Any]]]]:
        """Return a task's vector in every layer, and what Theorem 1 says of it and the subspaces of its data."""

        def examine(number: int) -> tuple[TaskVector, list[dict[str, Any]]]:
            layer, V_d = self.layers[number], data[number]
            tau = weights[layer.name] - self.weights[layer.name]
            rows = []
            for rank in (rank for rank in _THEOREM_RANKS if rank <= min(layer.shape)):
                V = V_d[:, :rank]
                check = check_theorem(*split_by_data(tau, V), V, max(rank, self.config.task_rank))
                about = {"task": task, "layer": layer.name, "r_d": rank}
                rows.append({**about, **asdict(check), "violated": check.violated})
            return task_vector(tau, max(RANKS)), rows

        return list(map_layers(examine, range(len(self.layers)), torch.device("cpu")))

    def _affinities(
        self, data: list[list[Tensor]], vectors: list[list[TaskVector]], ranks: list[int]
    ) -> tuple[Floats, Floats]:
        """Return A ``(layers, T, T)`` at the settings' ranks, and ``(layers, T, T, len(ranks))`` for r_d = r_v."""
        A = np.zeros((len(self.layers), len(self.tasks), len(self.tasks)))
        curve = np.zeros((*A.shape, len(ranks)))
        for number, i, j in np.ndindex(*A.shape):
            V_d, V = data[i][number], vectors[j][number].V
            A[number, i, j] = float(subspace_affinity(V_d[:, : self.config.data_rank], V[:, : self.config.task_rank]))
            curve[number, i, j] = affinity_by_rank(V_d, V, ranks).numpy()
        return A, curve


def merged_layers(model: nn.Module, target_modules: str | Sequence[str]) -> tuple[list[Layer], dict[str, View]]:
    """Return the linear layers that are merged, and where the model holds them; of an encoder-decoder the encoder's.

    Raises:
        ValueError: none of the merged layers is a linear layer by itself.
    """
    chosen = select_layers(model, target_modules)
    views = {name: view for name, view in chosen.items() if view.linear and view.name == view.module}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        views = {name: view for name, view in views.items() if name.startswith("encoder.")}
    if not views:
        raise ValueError(f"none of the {len(chosen)} merged layers of {type(model).__name__} has inputs to be recorded")
    if len(views) < len(chosen):
        log.info("%d of %d merged layers are analysed: linear layers, of an encoder", len(views), len(chosen))
    return [Layer(name, view.shape, view.module) for name, view in views.items()], views


def layer_weights(model: nn.Module, views: Mapping[str, View]) -> Weights:
    """Copy the merged layers' weights, in float32 at least."""
    weights = {name: view.read(model) for name, view in views.items()}
    return {name: W.to("cpu", wide_dtype(W), copy=True) for name, W in weights.items()}
