"""Analyse a FusionBench model pool with the data of its task pool."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_nufilt.compare.experiment import Experiment
from fusion_bench_nufilt.continual.content import describe_items
from fusion_bench_nufilt.continual.models import PRETRAINED, refuse_missing_keys
from fusion_bench_nufilt.models.fit import check_module
from fusion_bench_nufilt.models.layers import MatrixView, select_layers
from fusion_bench_nufilt.nufilt.subspace import subspace_affinity
from fusion_bench_nufilt.pages.names import kind
from fusion_bench_nufilt.utils.devices import map_layers
from fusion_bench_nufilt.utils.files import file_name
from fusion_bench_nufilt.utils.tensors import to_compute_dtype

from .record import (
    Loader,
    Moments,
    known_moments,
    memory_of,
    record_moments,
    shared_inputs,
    task_inputs,
)
from .settings import MOMENTS, AnalysisConfig
from .subspaces import VectorSummary, affinity_by_rank, data_subspace, task_vector
from .summary import Analysis, Row

log = logging.getLogger(__name__)

RANKS = (1, 2, 4, 8, 16, 32, 64)
MEMORY = 4 * 10**9  # bytes of the moments that are recorded together


class PoolAnalysis:
    """A model pool under analysis. What needs data is recorded once, in ``folder / MOMENTS``."""

    def __init__(
        self,
        experiment: Experiment,
        name: str,
        config: AnalysisConfig,
        folder: Path,
        targets: str | Sequence[str],
    ) -> None:
        self.experiment = experiment
        self.name = name
        self.config = config
        self.folder = folder
        # Its data are looked up before any model is loaded.
        self.taskpool = experiment.evaluator.taskpool
        self.tasks = experiment.tasks
        self.pretrained, drawn_keys = experiment.load(PRETRAINED)
        self.views = merged_layers(self.pretrained, targets)
        self._keys = {view.key for view in self.views.values()}
        missing_keys = [key for key in drawn_keys if key in self._keys]
        refuse_missing_keys(PRETRAINED, missing_keys, can_exclude=False)
        self._modules = [view.module for view in self.views.values()]
        self._inputs: dict[str, Loader] = {}
        self._samples: dict[str, int] = {}
        for task in self.tasks:
            inputs = task_inputs(self.taskpool, task, config.samples, config.seed)
            self._inputs[task] = inputs
            self._samples[task] = len(inputs.dataset)  # type: ignore[arg-type]
        #: By module, the one whose inputs are the same; the owners alone are recorded.
        self.owner = shared_inputs(self.pretrained, self._modules, self._inputs[self.tasks[0]])
        self.owners = sorted(set(self.owner.values()))
        self.moments: dict[str, Moments] = {}

    @property
    def memory_note(self) -> str:
        needed = memory_of(self.pretrained, self.owners)
        at_a_time = min(needed, MEMORY)
        on_disk = needed / 3  # float32 means, without the float64 sums
        moments = f"second moments of {len(self.owners)} inputs of {len(self.views)} layers"
        return (
            f"{moments}, for each of {len(self.tasks)} tasks: at most {at_a_time / 1e6:.0f} MB of "
            f"memory at a time, {on_disk / 1e6:.0f} MB on disk"
        )

    def load(self, task: str) -> nn.Module:
        """Load a task's model, and check that it can be merged."""
        model, missing_keys = self.experiment.load(task)
        check_module(self.pretrained, model, task, missing_keys, self._keys)
        return model

    def run(self, on_task: Callable[[], Any] = lambda: None) -> Analysis:
        """Record what has not been recorded yet, and compare the tasks' data with their task
        vectors.
        """
        samples: Row = {}
        about = {"modelpool": self.name, "samples": samples, "settings": asdict(self.config)}
        shapes = {layer: view.shape for layer, view in self.views.items()}
        result = Analysis(about, self.tasks, shapes, self.config.task_rank)
        layers = list(self.views)
        data: dict[str, dict[str, Tensor]] = {layer: {} for layer in layers}  # V_d
        vectors: dict[str, dict[str, VectorSummary]] = {layer: {} for layer in layers}
        for task in self.tasks:
            model = self.load(task)
            self.moments[task] = self._moments(task, model)
            samples[task] = {"samples": self._samples[task], "inputs": self.moments[task].tokens}
            subspaces = self._data_subspaces(self.moments[task])
            measure = partial(self._task_vector, model)
            task_vectors = map_layers(measure, layers, torch.device("cpu"))
            for layer, vector in zip(layers, task_vectors, strict=True):
                data[layer][task] = subspaces[layer]
                vectors[layer][task] = vector
            on_task()
        for layer, view in self.views.items():
            size = float(torch.linalg.vector_norm(layer_weight(self.pretrained, view)))
            result.add_vectors(layer, size, vectors[layer])
            result.affinity += self._affinities(layer, data[layer], vectors[layer])
        about["scored"] = self.experiment.evaluator.scored
        result.vectors.sort(key=lambda row: self.tasks.index(row["task"]))
        return result

    def _moments(self, task: str, model: nn.Module) -> Moments:
        """Return the second moments of a task's inputs, recorded now unless they were before."""
        recorded_model = self.pretrained
        name = PRETRAINED
        # Theorem 1 rests on the inputs at the end of fine-tuning, those of the task's own model.
        if self.config.activations == "own":
            recorded_model = model
            name = task
        inputs = self._inputs[task]
        about = {
            "task": task,
            "inputs": describe_items(inputs.dataset),
            "layers": self._modules,
            "weights": self.experiment.digest(name),
            "taskpool": self.experiment.settings["taskpool"],
        }
        folder = self.folder / MOMENTS / file_name(task)
        moments = known_moments(folder, about)
        if moments is None:
            moments = record_moments(recorded_model, inputs, self.owner, folder, about, MEMORY)
        if moments.tokens < self.config.data_rank:
            raise ValueError(
                f"the {self._samples[task]} samples of task '{task}' have {moments.tokens} tokens, "
                f"which do not span r_d = {self.config.data_rank} directions: raise samples"
            )
        return moments

    def _data_subspaces(self, moments: Moments) -> dict[str, Tensor]:
        """Return V_d of every layer."""

        def solve(owner: str) -> Tensor:
            return data_subspace(moments.read(owner), max(RANKS))

        subspaces = map_layers(solve, self.owners, torch.device("cpu"))
        by_owner = dict(zip(self.owners, subspaces, strict=True))
        return {layer: by_owner[self.owner[view.module]] for layer, view in self.views.items()}

    def _task_vector(self, model: nn.Module, layer: str) -> VectorSummary:
        view = self.views[layer]
        tau = layer_weight(model, view) - layer_weight(self.pretrained, view)
        return task_vector(tau, max(RANKS))

    def _affinities(
        self, layer: str, data: Mapping[str, Tensor], vectors: Mapping[str, VectorSummary]
    ) -> list[Row]:
        """Compare the data and the vectors of all tasks in a layer, at the settings' ranks and for
        r_d = r_v.
        """
        narrowest = min(min(view.shape) for view in self.views.values())
        ranks = [rank for rank in RANKS if rank <= narrowest]
        d_i = self.views[layer].shape[1]
        r_d = self.config.data_rank
        r_v = self.config.task_rank
        rows = []
        for data_task, vector_task in product(data, vectors):
            V_d = data[data_task]
            vector = vectors[vector_task]
            if vector.norm == 0:  # there are no directions to compare
                continue
            by_rank = affinity_by_rank(V_d, vector.V, ranks).tolist()
            row: Row = {"layer": layer, "kind": kind(layer)}
            row |= {"data": data_task, "vector": vector_task}
            row["affinity"] = float(subspace_affinity(V_d[:, :r_d], vector.V[:, :r_v]))
            row["chance"] = vector.directions(r_v) / d_i
            row["by_rank"] = dict(zip(ranks, by_rank, strict=True))
            rows.append(row)
        return rows


def merged_layers(model: nn.Module, target_modules: str | Sequence[str]) -> dict[str, MatrixView]:
    """Return the views of the linear layers that are merged; of an encoder-decoder, those of the
    encoder.
    """
    chosen = select_layers(model, target_modules)
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    views = {}
    for name, view in chosen.items():
        has_inputs = view.linear and view.name == view.module
        # Of T5, the authors' own analysis has the encoder's layers alone.
        if has_inputs and (name.startswith("encoder.") or not is_encoder_decoder):
            views[name] = view
    if not views:
        raise ValueError(
            f"none of the {len(chosen)} merged layers of {type(model).__name__} has inputs to be "
            "recorded"
        )
    if len(views) < len(chosen):
        log.info(
            "%d of %d merged layers are analysed: linear layers, of an encoder",
            len(views),
            len(chosen),
        )
    return views


def layer_weight(model: nn.Module, view: MatrixView) -> Tensor:
    return to_compute_dtype(view.read(model)).cpu()
