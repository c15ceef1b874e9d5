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
from fusion_bench_nufilt.continual.models import PRETRAINED, refuse_missing_keys
from fusion_bench_nufilt.merge.checks import check_module
from fusion_bench_nufilt.models import select_layers
from fusion_bench_nufilt.models.views import MatrixView
from fusion_bench_nufilt.nufilt.subspace import subspace_affinity
from fusion_bench_nufilt.pages.names import kind
from fusion_bench_nufilt.utils.devices import map_layers
from fusion_bench_nufilt.utils.files import file_name
from fusion_bench_nufilt.utils.tensors import widened

from .record import (
    Loader,
    Moments,
    known_moments,
    memory_of,
    record_moments,
    shared_inputs,
    task_inputs,
)
from .settings import AnalysisConfig
from .subspaces import TaskVector, affinity_by_rank, data_subspace, task_vector
from .summary import Analysis, Row

log = logging.getLogger(__name__)

RANKS = (1, 2, 4, 8, 16, 32, 64)
MEMORY = 4 * 10**9  # bytes of the moments that are recorded together


class PoolAnalysis:
    """A model pool under analysis. What needs data is recorded once, in ``folder / "moments"``."""

    def __init__(
        self,
        experiment: Experiment,
        name: str,
        config: AnalysisConfig,
        folder: Path,
        targets: str | Sequence[str],
    ) -> None:
        self.experiment, self.name, self.config, self.folder = experiment, name, config, folder
        self.taskpool = (
            experiment.evaluator.taskpool
        )  # whose data are looked up before any model is loaded
        self.tasks = experiment.tasks
        self._pairs = config.named_pairs(self.tasks)
        self.pretrained, drawn = experiment.load(PRETRAINED)
        self.views = merged_layers(self.pretrained, targets)
        self._keys = {view.key for view in self.views.values()}
        refuse_missing_keys(
            PRETRAINED, [key for key in drawn if key in self._keys], can_exclude=False
        )
        self._modules = [view.module for view in self.views.values()]
        self.width = min(
            view.shape[1] for view in self.views.values()
        )  # d_i of the narrowest layer
        self._inputs = self._draw_inputs(config.samples)
        self._samples = {task: len(inputs.dataset) for task, inputs in self._inputs.items()}  # type: ignore[arg-type]
        for task, count in self._samples.items():
            if count < config.data_rank:
                raise ValueError(
                    f"task '{task}' has {count} samples, fewer than r_d = {config.data_rank}"
                )
        #: By module, the one whose inputs are the same; the owners alone are recorded.
        self.owner = shared_inputs(self.pretrained, self._modules, self._inputs[self.tasks[0]])
        self.owners = sorted(set(self.owner.values()))
        self.moments: dict[str, Moments] = {}

    @property
    def memory_note(self) -> str:
        needed = memory_of(self.pretrained, self.owners)
        return (
            f"second moments of {len(self.owners)} inputs of {len(self.views)} layers, for each of "
            f"{len(self.tasks)} "
            f"tasks: at most {min(needed, MEMORY) / 1e6:.0f} MB of memory at a time, "
            f"{needed / 3e6:.0f} MB on disk"
        )

    def load(self, task: str) -> nn.Module:
        """Load a task's model, and check that it can be merged."""
        model, drawn = self.experiment.load(task)
        check_module(self.pretrained, model, task, drawn, self._keys)
        return model

    def run(self, on_task: Callable[[], Any] = lambda: None) -> Analysis:
        """Record what has not been recorded yet, and compare the tasks' data with their task
        vectors.
        """
        samples: Row = {}
        about = {"modelpool": self.name, "samples": samples, "settings": asdict(self.config)}
        shapes = {layer: view.shape for layer, view in self.views.items()}
        result = Analysis(about, self.tasks, shapes, self.config.task_rank, pairs=self._pairs)
        data: dict[str, dict[str, Tensor]] = {
            layer: {} for layer in self.views
        }  # V_d by layer and task
        vectors: dict[str, dict[str, TaskVector]] = {layer: {} for layer in self.views}
        for task in self.tasks:
            model = self.load(task)
            self.moments[task] = self._moments(task, model)
            samples[task] = {"samples": self._samples[task], "inputs": self.moments[task].tokens}
            subspaces = self._data_subspaces(self.moments[task])
            layers = list(self.views)
            task_vectors = map_layers(
                partial(self._task_vector, model), layers, torch.device("cpu")
            )
            for layer, vector in zip(layers, task_vectors, strict=True):
                data[layer][task] = subspaces[layer]
                vectors[layer][task] = vector
            on_task()
        for layer, view in self.views.items():
            size = float(torch.linalg.vector_norm(layer_weight(self.pretrained, view)))
            result.add_vectors(layer, size, vectors[layer])
            result.affinity += self._affinities(layer, data[layer], vectors[layer])
        result.vectors.sort(key=lambda row: self.tasks.index(row["task"]))
        return result

    def _draw_inputs(self, samples: int) -> dict[str, Loader]:
        return {
            task: task_inputs(self.taskpool, task, samples, self.config.seed) for task in self.tasks
        }

    def _moments(self, task: str, model: nn.Module) -> Moments:
        """Return the second moments of a task's inputs, recorded now unless they were before."""
        source, name = (
            (model, task) if self.config.activations == "own" else (self.pretrained, PRETRAINED)
        )
        about = {
            "task": task,
            "activations": self.config.activations,
            "samples": self._samples[task],
            "seed": self.config.seed,
            "layers": self._modules,
            "weights": self.experiment.digest(name),
            "taskpool": self.experiment.settings["taskpool"],
        }
        folder = self.folder / "moments" / file_name(task)
        known = known_moments(folder, about)
        return known or record_moments(
            source, self._inputs[task], self.owner, folder, about, MEMORY
        )

    def _data_subspaces(self, moments: Moments) -> dict[str, Tensor]:
        found = map_layers(
            lambda own: data_subspace(moments.read(own), max(RANKS)),
            self.owners,
            torch.device("cpu"),
        )
        solved = dict(zip(self.owners, found, strict=True))
        return {layer: solved[self.owner[view.module]] for layer, view in self.views.items()}

    def _task_vector(self, model: nn.Module, layer: str) -> TaskVector:
        view = self.views[layer]
        tau = layer_weight(model, view) - layer_weight(self.pretrained, view)
        return task_vector(tau, max(RANKS))

    def _affinities(
        self, layer: str, data: Mapping[str, Tensor], vectors: Mapping[str, TaskVector]
    ) -> list[Row]:
        """Compare the data and the vectors of all tasks in a layer, at the settings' ranks and for
        r_d = r_v.
        """
        narrowest = min(min(view.shape) for view in self.views.values())
        ranks = [rank for rank in RANKS if rank <= narrowest]
        d_i = self.views[layer].shape[1]
        r_d, r_v = self.config.data_rank, self.config.task_rank
        rows = []
        for (of_data, V_d), (of_vector, vector) in product(data.items(), vectors.items()):
            if vector.norm == 0:  # there are no directions to compare
                continue
            by_rank = affinity_by_rank(V_d, vector.V, ranks).tolist()
            rows.append(
                {
                    "layer": layer,
                    "kind": kind(layer),
                    "data": of_data,
                    "vector": of_vector,
                    "affinity": float(subspace_affinity(V_d[:, :r_d], vector.V[:, :r_v])),
                    "chance": vector.directions(r_v) / d_i,
                    "by_rank": dict(zip(ranks, by_rank, strict=True)),
                }
            )
        return rows


def merged_layers(model: nn.Module, target_modules: str | Sequence[str]) -> dict[str, MatrixView]:
    """Return the views of the linear layers that are merged; of an encoder-decoder, those of the
    encoder.
    """
    chosen = select_layers(model, target_modules)
    views = {
        name: view for name, view in chosen.items() if view.linear and view.name == view.module
    }
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        views = {name: view for name, view in views.items() if name.startswith("encoder.")}
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
    return widened(view.read(model)).cpu()
