"""The analysis of a FusionBench model pool, with the data that its task pool has."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fusion_bench_nufilt.compare.experiment import Experiment
from fusion_bench_nufilt.core.dtypes import wide_dtype
from fusion_bench_nufilt.core.workers import map_layers
from fusion_bench_nufilt.layers import check_model, select_layers
from fusion_bench_nufilt.layers.views import View

from .affinity import Floats, affinity, affinity_by_rank
from .bounds import check_theorem, split_by_data
from .inputs import TaskInputs, task_inputs
from .moments import data_subspace
from .record import Moments, known_moments, memory_of, record_moments, shared_inputs
from .results import Analysis, Layer, VectorRow
from .settings import AnalysisConfig
from .spectra import TaskVector, compare, task_vector

log = logging.getLogger(__name__)

RANKS = (1, 2, 4, 8, 16, 32, 64)
_THEOREM_RANKS = (1, 4, 8)
MEMORY = 4 * 10**9  # bytes of moments that are recorded at a time

Weights = dict[str, Tensor]


class _LayerFindings(NamedTuple):
    """What a task's vector and data are like in a layer."""

    vector: TaskVector
    row: VectorRow
    theorem: list[dict[str, Any]]


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
        data: list[dict[str, Tensor]] = []  # V_d by task and owner
        found: list[list[_LayerFindings]] = []  # by task and layer
        for task in self.tasks:
            model = self.load(task)
            self.moments[task] = self._moments(task, model)
            data.append(self._data_subspaces(self.moments[task]))
            found.append(self._examine(task, layer_weights(model, self.views), data[-1]))
            on_task()
        vectors = [[each.vector for each in layer] for layer in zip(*found, strict=True)]
        rows = [each.row for layers in found for each in layers]
        samples = {
            task: {"samples": len(self.inputs[task]), "inputs": self.moments[task].tokens} for task in self.tasks
        }
        about = {"modelpool": self.name, "samples": samples, "settings": asdict(self.config)}
        comparisons = [compare(layer, self.config.task_rank) for layer in vectors]
        result = Analysis.of_vectors(
            about, self.tasks, self.tasks, self.layers, comparisons, rows, self.config.task_rank
        )
        result.theorem = [row for layers in found for each in layers for row in each.theorem]
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

    def _data_subspaces(self, moments: Moments) -> dict[str, Tensor]:
        owners = sorted(set(self._owner.values()))

        def solve(owner: str) -> Tensor:
            return data_subspace(moments.read(owner), max(RANKS))

        return dict(zip(owners, map_layers(solve, owners, torch.device("cpu")), strict=True))

    def _examine(self, task: str, weights: Weights, data: Mapping[str, Tensor]) -> list[_LayerFindings]:
        """Look at a task's vector in every layer, beside the subspaces of its data."""
        task_rank = self.config.task_rank

        def examine(layer: Layer) -> _LayerFindings:
            W_0 = self.weights[layer.name]
            tau = weights[layer.name] - W_0
            vector = task_vector(tau, max(RANKS))
            row = VectorRow.of(task, layer, vector, W_0, task_rank)
            V_d = data[self._owner[layer.module]]
            return _LayerFindings(vector, row, _theorem_rows(task, layer, tau, V_d, task_rank))

        return list(map_layers(examine, self.layers, torch.device("cpu")))

    def _affinities(
        self, data: list[dict[str, Tensor]], vectors: list[list[TaskVector]], ranks: list[int]
    ) -> tuple[Floats, Floats]:
        """Return A ``(layers, T, T)`` at the settings' ranks, and ``(layers, T, T, len(ranks))`` for r_d = r_v."""
        count, config = len(self.tasks), self.config
        A = np.zeros((len(self.layers), count, count))
        curve = np.zeros((*A.shape, len(ranks)))
        for number, i, j in np.ndindex(*A.shape):
            V_d, V = data[i][self._owner[self.layers[number].module]], vectors[number][j].V
            A[number, i, j] = float(affinity(V_d[:, : config.data_rank], V[:, : config.task_rank]))
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


def _theorem_rows(task: str, layer: Layer, tau: Tensor, V_d: Tensor, task_rank: int) -> list[dict[str, Any]]:
    rows = []
    for rank in (rank for rank in _THEOREM_RANKS if rank <= min(layer.shape)):
        check = check_theorem(*split_by_data(tau, V_d[:, :rank]), V_d[:, :rank], max(rank, task_rank))
        rows.append({"task": task, "layer": layer.name, "r_d": rank, **asdict(check), "violated": check.violated})
    return rows
