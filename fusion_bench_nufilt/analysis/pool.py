"""The analysis of a FusionBench model pool, with the data that its task pool has."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fusion_bench_nufilt.compare.workbench import Workbench
from fusion_bench_nufilt.core.workers import map_layers
from fusion_bench_nufilt.layers import check_model, select_layers
from fusion_bench_nufilt.layers.views import View

from .affinity import affinity, affinity_by_rank
from .bounds import check_theorem, split_by_data
from .inputs import TaskInputs, task_inputs
from .losses import Weights, weights_of
from .moments import data_subspace
from .record import MomentFile, known_moments, memory_of, record_moments, shared_inputs
from .results import Analysis, Layer, TheoremRow, VectorRow
from .settings import AnalysisConfig
from .spectra import TaskVector, energy_curves, overlaps, task_vector

log = logging.getLogger(__name__)

RANKS = (1, 2, 4, 8, 16, 32, 64)
_THEOREM_RANKS = (1, 4, 8)
MEMORY = 4 * 10**9  # bytes of moments that are recorded at a time


class PoolAnalysis:
    """A model pool under analysis. What needs data is recorded once, in ``folder / "moments"``.

    Args:
        workbench: models and data.
        name: of the model pool, for people.
        config: what to measure.
        folder: of the results.
        target_modules: which layers, see :func:`fusion_bench_nufilt.layers.select_layers`.

    Raises:
        ValueError: the task pool lacks a task's data, or has fewer samples than r_d; a model that does not fit.
    """

    def __init__(
        self,
        workbench: Workbench,
        name: str,
        config: AnalysisConfig,
        folder: Path,
        target_modules: str | Sequence[str] = "auto",
    ) -> None:
        self.workbench, self.name, self.config, self.folder = workbench, name, config, folder
        self.pretrained: nn.Module = workbench.modelpool.load_pretrained_model()
        self.tasks = workbench.tasks
        self.layers, self.views = merged_layers(self.pretrained, target_modules)
        self.weights: Weights = weights_of(self.pretrained, self.views)
        taskpool = workbench.evaluator.taskpool
        self.inputs = {task: task_inputs(taskpool, task, config.samples, config.seed) for task in self.tasks}
        for task, inputs in self.inputs.items():
            if len(inputs) < config.data_rank:
                raise ValueError(f"task '{task}' has {len(inputs)} samples, fewer than r_d = {config.data_rank}")
        modules = [layer.module for layer in self.layers]
        first = self.inputs[self.tasks[0]]
        self._owner = shared_inputs(self.pretrained, modules, lambda: first.one(self.pretrained))
        self.moments: dict[str, MomentFile] = {}

    @property
    def width(self) -> int:
        """d_i of the narrowest layer."""
        return min(layer.shape[1] for layer in self.layers)

    @property
    def memory_note(self) -> str:
        """What recording will take."""
        needed, owners = memory_of(self.pretrained, self._owner), len(set(self._owner.values()))
        return (
            f"second moments of {owners} inputs of {len(self.layers)} layers, for each of {len(self.tasks)} tasks: at "
            f"most {min(needed, MEMORY) / 1e6:.0f} MB of memory at a time, {needed / 3e6:.0f} MB on disk"
        )

    def few_inputs(self) -> dict[str, TaskInputs]:
        """Those of the propagated losses; none if they are switched off."""
        if not self.config.propagated:
            return {}
        taskpool, config = self.workbench.evaluator.taskpool, self.config
        return {task: task_inputs(taskpool, task, config.propagated, config.seed, keep=True) for task in self.tasks}

    def load(self, task: str) -> nn.Module:
        """A task's model, if it can be merged."""
        model: nn.Module = self.workbench.modelpool.load_model(task)
        check_model(self.pretrained, model, {view.key for view in self.views.values()}, name=task)
        return model

    def look(self, on_task: Callable[[], Any] = lambda: None) -> Analysis:
        """Record what is not recorded yet, and compare the tasks' data with their vectors."""
        vectors: list[list[TaskVector]] = []  # by task and layer
        data: list[dict[str, Tensor]] = []  # V_d by task and owner
        rows: list[VectorRow] = []
        theorem: list[TheoremRow] = []
        for task in self.tasks:
            model = self.load(task)
            moments = self.moments[task] = self._record(task, model)
            theirs = weights_of(model, self.views)
            subspaces = self._data_subspaces(moments)
            data.append(subspaces)

            def examine(
                layer: Layer, task: str = task, theirs: Weights = theirs, V_d: dict[str, Tensor] = subspaces
            ) -> tuple[TaskVector, VectorRow, list[TheoremRow]]:
                W_0 = self.weights[layer.name]
                tau = theirs[layer.name] - W_0
                vector = task_vector(tau, max(RANKS))
                row = VectorRow.of(task, layer, vector, W_0, self.config.task_rank)
                return (
                    vector,
                    row,
                    _theorem_rows(task, layer, tau, V_d[self._owner[layer.module]], self.config.task_rank),
                )

            found = list(map_layers(examine, self.layers, torch.device("cpu")))
            vectors.append([vector for vector, _, _ in found])
            rows += [row for _, row, _ in found]
            theorem += [each for _, _, several in found for each in several]
            on_task()
        config, ranks, by_layer = self.config, self._ranks(), list(zip(*vectors, strict=True))
        about = {"modelpool": self.name, "samples": self._samples(), "settings": asdict(config)}
        result = Analysis(
            about=about,
            tasks=self.tasks,
            layers=self.layers,
            task_rank=config.task_rank,
            vectors=rows,
            names=self.tasks,
            overlaps=np.stack([overlaps(layer, config.task_rank) for layer in by_layer]),
            energy=energy_curves(self.tasks, [[vector.energy for vector in layer] for layer in by_layer]),
            ranks=ranks,
            theorem=theorem,
        )
        result.affinity, result.affinity_by_rank = self._affinities(data, vectors, ranks)
        return result

    def _record(self, task: str, model: nn.Module) -> MomentFile:
        source = model if self.config.activations == "own" else self.pretrained
        about = {
            "task": task,
            "activations": self.config.activations,
            "samples": len(self.inputs[task]),
            "seed": self.config.seed,
            "layers": [layer.module for layer in self.layers],
            "weights": _digest(source),
            "taskpool": self.workbench.settings["taskpool"],
        }
        folder = self.folder / "moments" / task
        if (known := known_moments(folder, about)) is not None:
            return known
        run = self.inputs[task].passes(source)
        return record_moments(source, run, self._owner, folder, about, MEMORY)

    def _data_subspaces(self, moments: MomentFile) -> dict[str, Tensor]:
        owners = sorted(set(self._owner.values()))

        def solve(owner: str) -> Tensor:
            return data_subspace(moments.read(owner), max(RANKS))

        return dict(zip(owners, map_layers(solve, owners, torch.device("cpu")), strict=True))

    def _ranks(self) -> list[int]:
        smallest = min(min(layer.shape) for layer in self.layers)
        return [rank for rank in RANKS if rank <= smallest]

    def _samples(self) -> dict[str, Any]:
        return {task: {"samples": len(self.inputs[task]), "inputs": self.moments[task].tokens} for task in self.tasks}

    def _affinities(
        self, data: list[dict[str, Tensor]], vectors: list[list[TaskVector]], ranks: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        count, config = len(self.tasks), self.config
        A = np.zeros((len(self.layers), count, count))
        curve = np.zeros((*A.shape, len(ranks)))
        for number, layer in enumerate(self.layers):
            for i in range(count):
                V_d = data[i][self._owner[layer.module]]
                for j in range(count):
                    V = vectors[j][number].V
                    A[number, i, j] = float(affinity(V_d[:, : config.data_rank], V[:, : config.task_rank]))
                    curve[number, i, j] = affinity_by_rank(V_d, V, ranks).numpy()
        return A, curve


def merged_layers(model: nn.Module, target_modules: str | Sequence[str]) -> tuple[list[Layer], dict[str, View]]:
    """The linear layers that are merged, and where the model holds them; of an encoder-decoder the encoder's.

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
        log.info("%d of %d merged layers are looked at: linear layers, of an encoder", len(views), len(chosen))
    return [Layer(name, view.shape, view.module) for name, view in views.items()], views


def _theorem_rows(task: str, layer: Layer, tau: Tensor, V_d: Tensor, task_rank: int) -> list[TheoremRow]:
    rows = []
    for rank in (rank for rank in _THEOREM_RANKS if rank <= min(layer.shape)):
        check = check_theorem(*split_by_data(tau, V_d[:, :rank]), V_d[:, :rank], max(rank, task_rank))
        rows.append(TheoremRow(task, layer.name, rank, check.misalignment, check.zeta, check.zeta_spectral))
    return rows


def _digest(model: nn.Module) -> str:
    """Of all weights, so that what was recorded with others is not taken for theirs."""
    sha = hashlib.sha256()
    for value in model.state_dict().values():
        sha.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()
