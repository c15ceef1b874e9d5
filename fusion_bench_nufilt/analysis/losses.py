"""Measures what a method did to each layer, one step after another."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_nufilt.core import FusionConfig
from fusion_bench_nufilt.core.subspace import right_singular_basis
from fusion_bench_nufilt.core.workers import map_layers

from .bounds import corollary_bound
from .inputs import TaskInputs, layer_outputs
from .pool import PoolAnalysis, layer_weights
from .results import Layer, LossRow
from .surrogates import data_free_losses, layer_losses


class LossTracker:
    """The losses of one method over a stream, by layer and step.

    Args:
        pool: the models and their layers, with the recorded moments of every task.
        method: its label.
        config: the ranks of the data-free losses.
        bounds: whether to evaluate Corollary 1 as well.
    """

    def __init__(self, pool: PoolAnalysis, method: str, config: FusionConfig, *, bounds: bool = False) -> None:
        self.rows: list[LossRow] = []
        self._pool, self._method, self._config, self._bounds = pool, method, config, bounds
        self._inputs = pool.propagated_inputs
        self._seen: list[str] = []
        self._weights_before = pool.weights
        self._model_before = deepcopy(pool.pretrained) if self._inputs else None
        self._C_old: dict[str, Tensor] = {}  # mean of the seen tasks' moments, by the layer that owns them

    def update(self, task: str, merged: nn.Module, own: nn.Module) -> None:
        """Measure a step.

        Args:
            task: the task that was merged.
            merged: the model after it.
            own: the task's fine-tuned model.
        """
        layers = self._pool.layers
        new, theirs = layer_weights(merged, self._pool.views), layer_weights(own, self._pool.views)
        propagated: dict[str, dict[str, float]] = {}
        if self._model_before is not None:
            propagated = self._propagated(task, self._model_before, merged, own)
            self._model_before = deepcopy(merged)

        def measure(layer: Layer) -> LossRow:
            extra = {name: losses[layer.name] for name, losses in propagated.items()}
            return self._measure(layer, task, new[layer.name], theirs[layer.name], extra)

        self.rows += map_layers(measure, layers, torch.device("cpu"))
        self._seen.append(task)
        self._weights_before = new
        moments = self._pool.moments[task]
        for owner in {moments.owner(layer.module) for layer in layers}:
            C = moments.read(owner)
            mean = self._C_old.setdefault(owner, torch.zeros_like(C))
            mean += (C - mean) / len(self._seen)

    def _measure(self, layer: Layer, task: str, W_new: Tensor, W_task: Tensor, extra: dict[str, Any]) -> LossRow:
        moments = self._pool.moments[task]
        W_0, W_old = self._pool.weights[layer.name], self._weights_before[layer.name]
        C_task, C_old = moments.read(layer.module), self._C_old.get(moments.owner(layer.module))
        tau_old, tau_task, ranks = W_old - W_0, W_task - W_0, self._config.ranks(W_0.shape[1])
        V_p, V_t = right_singular_basis(tau_old, ranks.null), right_singular_basis(tau_task, ranks.task)
        stability, plasticity = data_free_losses(W_new - W_0, tau_old, tau_task, V_p, V_t)
        extra |= layer_losses(W_new, W_old, W_task, C_old, C_task)
        if self._bounds and C_old is not None:
            extra["stability_bound"] = corollary_bound(W_new - W_old, C_old, V_p)[1]
            extra["plasticity_bound"] = corollary_bound(W_new - W_task, C_task, V_t)[1]
        return LossRow(
            method=self._method,
            step=len(self._seen) + 1,
            task=task,
            layer=layer.name,
            data_free_stability=stability if self._seen else None,
            data_free_plasticity=plasticity,
            **extra,
        )

    def _propagated(
        self, task: str, before: nn.Module, merged: nn.Module, own: nn.Module
    ) -> dict[str, dict[str, float]]:
        """Return the losses for which each model's layers get that model's own inputs, by name and layer."""
        layers = self._pool.layers
        losses = {"propagated_plasticity": output_distance(merged, own, self._inputs[task], layers)}
        if moved := [output_distance(merged, before, self._inputs[old], layers) for old in self._seen]:
            means = {layer.name: sum(each[layer.name] for each in moved) / len(moved) for layer in layers}
            losses["propagated_stability"] = means
        return losses


@torch.no_grad()
def output_distance(a: nn.Module, b: nn.Module, inputs: TaskInputs, layers: Sequence[Layer]) -> dict[str, float]:
    r"""Return :math:`E \|f_l(a; u) - f_l(b; u)\|^2` for each layer of two models, over the tokens of samples u."""
    total = {layer.name: 0.0 for layer in layers}
    count = 0
    modules = [layer.module for layer in layers]
    with layer_outputs(a, modules) as of_a, layer_outputs(b, modules) as of_b:
        for _ in inputs.run_each(a, b):
            for layer in layers:
                difference = of_a[layer.module] - of_b[layer.module]
                total[layer.name] += float(difference.square().sum())
            count += len(difference)
    return {name: value / count for name, value in total.items()}
