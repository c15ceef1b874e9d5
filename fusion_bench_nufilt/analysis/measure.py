"""Measure the losses of whole methods while they merge."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_nufilt.compare.configs import compose_run, plain
from fusion_bench_nufilt.compare.presets import DATA_FREE
from fusion_bench_nufilt.compare.run import ONE_RUN
from fusion_bench_nufilt.compare.specs import RunSpec
from fusion_bench_nufilt.continual.algorithm import task_order
from fusion_bench_nufilt.nufilt.options import FusionConfig
from fusion_bench_nufilt.nufilt.subspace import top_right_singular_vectors
from fusion_bench_nufilt.pages.metrics import or_none
from fusion_bench_nufilt.utils.devices import map_layers
from fusion_bench_nufilt.utils.options import is_number

from .pool import PoolAnalysis, layer_weight
from .summary import Analysis, Row
from .surrogates import data_free_losses, layer_losses

log = logging.getLogger(__name__)


#: NUFILT and its ablations at the paper's ranks, as shares of the width, and the data-free
#: baselines.
DEFAULT_METHODS = ", ".join(
    [
        "NUFILT=nufilt:null_rank=0.1667:lora_rank=0.0833",
        "filter only=nufilt/filter_only:null_rank=0.1667",
        "adapter only=nufilt/adapter_only:null_rank=0.1667:lora_rank=0.0833",
        "naive sum=nufilt/naive",
        *DATA_FREE,
    ]
)


class LossTracker:
    """Measures what a method does to each layer of a pool, step after step.

    ``rows`` has the losses of each step and layer. The ranks of the data-free losses are those of
    the method's ``settings``.
    """

    def __init__(
        self, pool: PoolAnalysis, method: str, order: Sequence[str], settings: Mapping[str, Any]
    ) -> None:
        self.rows: list[Row] = []
        self._pool = pool
        self._method = method
        self._order = order
        self._config = _ranks(settings)
        self._previous = copy.deepcopy(pool.pretrained)
        # Mean of the second moments of the tasks so far, by the layer that owns them.
        self._C_old: dict[str, Tensor] = {}

    def update(self, step: int, merged: nn.Module) -> None:
        """Measure a step (from 1), given the model after it."""
        task = self._order[step - 1]
        task_model = self._pool.load(task)
        layers = list(self._pool.views)

        def measure(layer: str) -> Row:
            return self._measure(layer, task, merged, task_model)

        losses = map_layers(measure, layers, torch.device("cpu"))
        for layer, row in zip(layers, losses, strict=True):
            about = {"method": self._method, "step": step, "task": task, "layer": layer}
            self.rows.append(about | row)
        # Later steps change the merged model in place.
        self._previous = copy.deepcopy(merged)
        for owner in self._pool.owners:
            C = self._pool.moments[task].read(owner)
            mean = self._C_old.setdefault(owner, torch.zeros_like(C))
            # The mean so far: each task counts the same, however many inputs it has.
            mean += (C - mean) / step

    def _measure(self, layer: str, task: str, merged: nn.Module, task_model: nn.Module) -> Row:
        """Return a layer's losses; the first step, without old tasks, has no stability loss."""
        view = self._pool.views[layer]
        W_0 = layer_weight(self._pool.pretrained, view)
        W_old = layer_weight(self._previous, view)
        W_new = layer_weight(merged, view)
        W_task = layer_weight(task_model, view)
        C_old = self._C_old.get(self._pool.owner[view.module])
        C_task = self._pool.moments[task].read(view.module)
        row: Row = dict(layer_losses(W_new, W_old, W_task, C_old, C_task))

        ranks = self._config.ranks(W_0.shape[1])
        tau_old = W_old - W_0
        tau_task = W_task - W_0
        V_p = top_right_singular_vectors(tau_old, ranks.null)
        V_t = top_right_singular_vectors(tau_task, ranks.task)
        stability, plasticity = data_free_losses(W_new - W_0, tau_old, tau_task, V_p, V_t)
        row["data_free_stability"] = stability if self._C_old else None
        row["data_free_plasticity"] = plasticity
        return row


def _ranks(settings: Mapping[str, Any]) -> FusionConfig:
    """Return the method's ranks r_p and r_v, or NUFILT's where it has none."""
    ranks = {}
    for key in ("null_rank", "task_rank"):
        if is_number(settings.get(key)):
            ranks[key] = settings[key]
    return FusionConfig(**ranks)


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
        tracker = LossTracker(pool, spec.label, order, config)

        def measure(step: int, merged: nn.Module, tracker: LossTracker = tracker) -> None:
            tracker.update(step, merged)
            on_step()

        run = pool.experiment.run(config, measure)
        if run.matrix is None:
            result.failures[spec.label] = str(run.error)
            log.warning("%s failed: %s", spec.label, run.error)
        else:
            result.losses += tracker.rows
            metrics = run.matrix.metrics()
            result.scores[spec.label] = {name: or_none(metrics[name]) for name in ("ACC", "BWT")}
