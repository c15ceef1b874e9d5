"""Measure the losses of whole methods, while they merge or on the checkpoints of a run."""

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusion_bench_nufilt.compare.configs import compose_run, plain
from fusion_bench_nufilt.compare.paper import DATA_FREE, rank_for_width
from fusion_bench_nufilt.compare.run import ONE_RUN
from fusion_bench_nufilt.compare.specs import RunSpec
from fusion_bench_nufilt.core import FusionConfig
from fusion_bench_nufilt.core.options import is_number
from fusion_bench_nufilt.core.subspace import right_singular_basis
from fusion_bench_nufilt.core.workers import map_layers
from fusion_bench_nufilt.layers.views import View
from fusion_bench_nufilt.pages.metrics import AccuracyMatrix, or_none
from fusion_bench_nufilt.pages.run import RunContent
from fusion_bench_nufilt.storage.checkpoint import load_checkpoint, read_whole_checkpoint
from fusion_bench_nufilt.storage.files import read_json
from fusion_bench_nufilt.storage.schemas import Manifest
from fusion_bench_nufilt.stream.protocol import task_order
from fusion_bench_nufilt.stream.run_folder import RunFolder, differences

from .pool import PoolAnalysis, layer_weight
from .record import forward, watched_layers
from .summary import LOSSES, Analysis, Row
from .surrogates import corollary_bound, data_free_losses, layer_losses

log = logging.getLogger(__name__)


def default_methods(width: int) -> str:
    """Return NUFILT and its ablations at the paper's ranks, scaled to the width, and the data-free
    baselines.
    """
    r_p, r_l = rank_for_width("null_rank", 128, width), rank_for_width("lora_rank", 64, width)
    ranks = f"null_rank={r_p}:lora_rank={r_l}"
    return (
        f"NUFILT {r_p}/{r_l}/8=nufilt:{ranks}, filter only "
        f"({r_p})=nufilt/filter_only:null_rank={r_p}, "
        f"adapter only ({r_l}/8)=nufilt/adapter_only:{ranks}, naive sum=nufilt/naive, "
        f"{', '.join(DATA_FREE)}"
    )


class LossTracker:
    """Measures what a method does to each layer of a pool, step after step.

    The ranks of the data-free losses are those of the method's ``settings``. Corollary 1 is
    evaluated for the first method of a ``result``.
    """

    def __init__(
        self,
        pool: PoolAnalysis,
        result: Analysis,
        method: str,
        order: Sequence[str],
        settings: Mapping[str, Any],
        on_step: Callable[[], Any],
    ) -> None:
        self._pool, self._result, self._method, self._order = pool, result, method, order
        self._config, self._on_step, self._bounds = _ranks(settings), on_step, not result.losses
        self._rows: list[Row] = []
        self._before = copy.deepcopy(pool.pretrained)
        self._C_old: dict[
            str, Tensor
        ] = {}  # mean of the moments of the tasks so far, by the layer that owns them

    def update(self, step: int, merged: nn.Module) -> None:
        """Measure a step (from 1), given the model after it."""
        task, layers = self._order[step - 1], list(self._pool.views)
        own = self._pool.load(task)
        propagated = self._propagated(step, merged, own)
        found = map_layers(
            lambda layer: self._measure(layer, task, merged, own), layers, torch.device("cpu")
        )
        for layer, losses in zip(layers, found, strict=True):
            about = {"method": self._method, "step": step, "task": task, "layer": layer}
            self._rows.append(
                about | losses | {name: values[layer] for name, values in propagated.items()}
            )
        self._before = copy.deepcopy(merged)
        for owner in self._pool.owners:
            C = self._pool.moments[task].read(owner)
            mean = self._C_old.setdefault(owner, torch.zeros_like(C))
            mean += (C - mean) / step
        self._on_step()

    def finish(self, matrix: AccuracyMatrix | None) -> None:
        """Enter the losses of all steps into the result, and ACC and BWT where they are known."""
        self._result.losses += self._rows
        if matrix is not None:
            self._result.scores[self._method] = {
                "ACC": or_none(matrix.acc),
                "BWT": or_none(matrix.bwt),
            }

    def _measure(self, layer: str, task: str, merged: nn.Module, own: nn.Module) -> Row:
        """Return the losses of a layer on fixed inputs; the first step, without old tasks, has no
        stability loss.
        """
        view = self._pool.views[layer]
        models = (self._pool.pretrained, self._before, merged, own)
        W_0, W_old, W_new, W_task = (layer_weight(model, view) for model in models)
        C_old, C_task = (
            self._C_old.get(self._pool.owner[view.module]),
            self._pool.moments[task].read(view.module),
        )
        tau_old, tau_task, ranks = W_old - W_0, W_task - W_0, self._config.ranks(W_0.shape[1])
        V_p, V_t = (
            right_singular_basis(tau_old, ranks.null),
            right_singular_basis(tau_task, ranks.task),
        )
        stability, plasticity = data_free_losses(W_new - W_0, tau_old, tau_task, V_p, V_t)
        row: Row = layer_losses(W_new, W_old, W_task, C_old, C_task)
        row |= {
            "data_free_stability": stability if self._C_old else None,
            "data_free_plasticity": plasticity,
        }
        row |= dict.fromkeys(f"{name}_bound" for name in LOSSES) | dict.fromkeys(
            f"propagated_{name}" for name in LOSSES
        )
        if self._bounds and C_old is not None:
            row["stability_bound"] = corollary_bound(W_new - W_old, C_old, V_p)[1]
            row["plasticity_bound"] = corollary_bound(W_new - W_task, C_task, V_t)[1]
        return row

    def _propagated(
        self, step: int, merged: nn.Module, own: nn.Module
    ) -> dict[str, dict[str, float]]:
        """Return, by name and layer, the losses in which each model's layers get that model's own
        inputs.
        """
        inputs, views = self._pool.propagated_inputs, self._pool.views
        if not inputs:
            return {}
        *seen, task = self._order[:step]
        losses = {"propagated_plasticity": output_distance(merged, own, inputs[task], views)}
        if seen:
            moved = [output_distance(merged, self._before, inputs[old], views) for old in seen]
            losses["propagated_stability"] = {
                layer: fmean(each[layer] for each in moved) for layer in views
            }
        return losses


@torch.no_grad()
def output_distance(
    a: nn.Module, b: nn.Module, batches: Iterable[Any], views: Mapping[str, View]
) -> dict[str, float]:
    r"""Return :math:`E \|f_l(a; u) - f_l(b; u)\|^2` for each layer l of two models, over the tokens
    of samples u.
    """
    total, count = dict.fromkeys(views, 0.0), 0
    for batch in batches:
        of_a, of_b = _outputs(a, batch, views), _outputs(b, batch, views)
        for layer, Y in of_a.items():
            total[layer] += float((Y - of_b[layer].to(Y.device)).square().sum())
        count += len(Y)
    return {layer: value / count for layer, value in total.items()}


def _outputs(model: nn.Module, batch: Any, views: Mapping[str, View]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    modules = {view.module: layer for layer, view in views.items()}
    with watched_layers(
        model, list(modules), lambda name, X, Y: found.update({modules[name]: tokens(Y)})
    ) as tokens:
        forward(model, batch)
    return found


def _ranks(settings: Mapping[str, Any]) -> FusionConfig:
    """Return the method's ranks r_p and r_v, or NUFILT's where it has none."""
    known = {
        key: settings[key] for key in ("null_rank", "task_rank") if is_number(settings.get(key))
    }
    return FusionConfig(**known)


def measure_methods(
    pool: PoolAnalysis,
    result: Analysis,
    specs: Sequence[RunSpec],
    overrides: Sequence[str],
    on_step: Callable[[], Any],
) -> None:
    """Run methods over the stream, and enter their losses, ACC and BWT, or why they failed, into
    ``result``.
    """
    words = ["++method.evaluate=diagonal", *ONE_RUN, *overrides]  # ACC and BWT need no more
    for spec in specs:
        config = {**plain(compose_run([*words, *spec.overrides]).method), "seed": pool.config.seed}
        order = task_order(pool.tasks, shuffle=config["shuffle_order"], seed=pool.config.seed)
        tracker = LossTracker(pool, result, spec.label, order, config, on_step)
        run = pool.experiment.run(config, tracker.update)
        if run.matrix is None:
            result.failures[spec.label] = str(run.error)
            log.warning("%s failed: %s", spec.label, run.error)
        else:
            tracker.finish(run.matrix)


class FinishedRun(NamedTuple):
    folder: RunFolder
    label: str
    manifest: Manifest  # of its last step


def finished_runs(folders: Sequence[Path]) -> list[FinishedRun]:
    """Read finished runs, and label each by its method, or by its folder where two have the same
    method.
    """
    runs = [RunFolder(folder) for folder in folders]
    manifests = [_last_manifest(run) for run in runs]
    methods = [manifest["method"] for manifest in manifests]
    labels = [
        method if methods.count(method) == 1 else run.path.name
        for run, method in zip(runs, methods, strict=True)
    ]
    return list(map(FinishedRun, runs, labels, manifests))


def _last_manifest(run: RunFolder) -> Manifest:
    """Return the manifest of a run's last step, after checking the checkpoints of all steps."""
    first = run.checkpoint(1)
    if not first.is_dir():
        what = f"no log directory of a run with its checkpoints (there is no {first})"
        raise ValueError(f"'{run.path}' is {what}: run with method.save_on_every_step=true")
    manifest = read_whole_checkpoint(first)
    if old := differences(manifest, manifest):
        raise ValueError(f"'{run.path}' is a run of another {old[0]}: run it again")
    count = len(manifest["order"])
    for step in range(2, count + 1):
        folder = run.checkpoint(step)
        if not folder.is_dir():
            raise ValueError(
                f"'{run.path}' lacks the checkpoint of step {step} of {count}: is the run finished?"
            )
        before, manifest = manifest, read_whole_checkpoint(folder)
        other = differences(manifest, before)
        if other or manifest["step"] != before["step"] + 1:
            what = f"another {', '.join(other)}" if other else "a step of another number"
            raise ValueError(
                f"'{folder}' has {what} than the step before it: run '{run.path}' again"
            )
    return manifest


def measure_run(
    pool: PoolAnalysis, result: Analysis, run: FinishedRun, on_step: Callable[[], Any]
) -> None:
    """Enter the losses of a finished run on the pool's models, from its checkpoints, into
    ``result``.
    """
    folder, order, inputs = run.folder, run.manifest["order"], run.manifest["inputs"]
    if sorted(order) != sorted(pool.tasks):
        tasks = ", ".join(pool.tasks)
        raise ValueError(
            f"'{folder.path}' is a run of {', '.join(order)}, and the model pool has {tasks}"
        )
    for name, digest in pool.experiment.digests.items():
        if inputs.get(name, {}).get("sha256") != digest:
            raise ValueError(
                f"'{folder.path}' is a run of other models: '{name}' has other weights there"
            )
    tracker = LossTracker(pool, result, run.label, order, run.manifest["settings"], on_step)
    merged = copy.deepcopy(pool.pretrained)
    for step in range(1, len(order) + 1):
        load_checkpoint(merged, folder.checkpoint(step))
        tracker.update(step, merged)
    scores = read_json(
        folder.path / "accuracy_matrix.json",
        RunContent,
        "resume the run, and it is written again",
        sealed=True,
    )
    tracker.finish(
        AccuracyMatrix.from_rows(scores.tasks, scores.accuracy_matrix) if scores else None
    )
