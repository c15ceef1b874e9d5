"""Measures what a method did to each layer, one step after another."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from fusion_bench_nufilt.core import FusionConfig
from fusion_bench_nufilt.core.dtypes import wide_dtype
from fusion_bench_nufilt.core.subspace import right_singular_basis
from fusion_bench_nufilt.core.workers import map_layers
from fusion_bench_nufilt.layers.views import View

from .bounds import corollary_bound
from .inputs import TaskInputs
from .record import MomentFile, watching_outputs
from .results import Layer, LossRow
from .surrogates import data_free_losses, layer_losses

Weights = dict[str, Tensor]


def weights_of(model: nn.Module, views: Mapping[str, View]) -> Weights:
    """Copies of the merged layers' weights, in float32 at least."""
    found = {name: view.read(model) for name, view in views.items()}
    return {name: W.to("cpu", wide_dtype(W), copy=True) for name, W in found.items()}


class Meter:
    """The losses of one method over a stream.

    Args:
        method: its label.
        layers: the same for all methods.
        views: where models hold them.
        pretrained: weights of these layers.
        moments: of every task.
        config: the ranks of the data-free losses; the method's own where it has some.
        bounds: whether to evaluate Corollary 1 as well.
        inputs: samples for the propagated losses; none: they are left out.
        model: the pretrained model, for the propagated losses.
    """

    def __init__(
        self,
        method: str,
        layers: Sequence[Layer],
        views: Mapping[str, View],
        pretrained: Weights,
        moments: Mapping[str, MomentFile],
        config: FusionConfig,
        *,
        bounds: bool = False,
        inputs: Mapping[str, TaskInputs] | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self.rows: list[LossRow] = []
        self._method, self._layers, self._views = method, layers, views
        self._pretrained, self._moments = pretrained, moments
        self._config, self._bounds, self._inputs = config, bounds, inputs or {}
        self._before, self._model_before = pretrained, deepcopy(model) if inputs else None
        self._seen: list[str] = []
        self._C_old: dict[str, Tensor] = {}  # mean of the seen tasks' moments, by the layer that owns them

    def see(self, task: str, merged: nn.Module, own: nn.Module) -> None:
        """Take a step.

        Args:
            task: that was merged.
            merged: the model after it.
            own: the task's fine-tuned model.
        """
        new, theirs, moments = weights_of(merged, self._views), weights_of(own, self._views), self._moments[task]

        def measure(layer: Layer) -> LossRow:
            return self._measure(layer, task, new[layer.name], theirs[layer.name], moments)

        rows = list(map_layers(measure, list(self._layers), torch.device("cpu")))
        if self._inputs:
            rows = self._propagate(rows, task, merged, own)
            self._model_before = deepcopy(merged)
        self.rows += rows
        self._seen.append(task)
        for owner in {moments.owner(layer.module) for layer in self._layers}:
            C = moments.read(owner)
            mean = self._C_old.setdefault(owner, torch.zeros_like(C))
            mean += (C - mean) / len(self._seen)
        self._before = new

    def _measure(self, layer: Layer, task: str, W_new: Tensor, W_task: Tensor, moments: MomentFile) -> LossRow:
        W_0, W_old = self._pretrained[layer.name], self._before[layer.name]
        C_task, C_old = moments.read(layer.module), self._C_old.get(moments.owner(layer.module))
        losses = layer_losses(W_new, W_old, W_task, C_old, C_task)
        tau_old, tau_task, ranks = W_old - W_0, W_task - W_0, self._config.ranks(W_0.shape[1])
        V_p, V_t = right_singular_basis(tau_old, ranks.null), right_singular_basis(tau_task, ranks.task)
        free = data_free_losses(W_new - W_0, tau_old, tau_task, V_p, V_t)
        bounds: tuple[float | None, float | None] = (None, None)
        if self._bounds and C_old is not None:
            bounds = (
                corollary_bound(W_new - W_old, C_old, V_p)[1],
                corollary_bound(W_new - W_task, C_task, V_t)[1],
            )
        return LossRow(
            method=self._method,
            step=len(self._seen) + 1,
            task=task,
            layer=layer.name,
            stability=losses.stability,
            plasticity=losses.plasticity,
            relative_stability=losses.relative_stability,
            relative_plasticity=losses.relative_plasticity,
            data_free_stability=free[0] if self._seen else None,
            data_free_plasticity=free[1],
            stability_bound=bounds[0],
            plasticity_bound=bounds[1],
        )

    def _propagate(self, rows: list[LossRow], task: str, merged: nn.Module, own: nn.Module) -> list[LossRow]:
        assert self._model_before is not None
        plasticity = output_distance(merged, own, self._inputs[task], self._layers)
        moved = [output_distance(merged, self._model_before, self._inputs[old], self._layers) for old in self._seen]
        return [
            replace(
                row,
                propagated_plasticity=plasticity[row.layer],
                propagated_stability=sum(each[row.layer] for each in moved) / len(moved) if moved else None,
            )
            for row in rows
        ]


@torch.no_grad()
def output_distance(a: nn.Module, b: nn.Module, inputs: TaskInputs, layers: Sequence[Layer]) -> dict[str, float]:
    r"""For each layer :math:`E \|f_l(a; u) - f_l(b; u)\|^2` over the tokens of samples u, of two whole models."""
    total = {layer.name: 0.0 for layer in layers}
    count = 0
    modules = [layer.module for layer in layers]
    with watching_outputs(a, modules) as of_a, watching_outputs(b, modules) as of_b:
        for _ in inputs.passes(a, b)():
            for layer in layers:
                difference = of_a[layer.module] - of_b[layer.module]
                total[layer.name] += float(difference.square().sum())
            count += len(difference)
    return {name: value / count for name, value in total.items()}
