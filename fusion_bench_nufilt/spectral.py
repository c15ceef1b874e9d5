"""Spectral accumulation as a FusionBench algorithm. Ours, not the paper's."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from fusion_bench import auto_register_config
from torch import Tensor

from fusion_bench_nufilt.continual import ProtocolConfig
from fusion_bench_nufilt.core.options import takes_options
from fusion_bench_nufilt.core.spectral import SpectralConfig, SpectralReport, Votes, accumulate_layer, strengths
from fusion_bench_nufilt.core.workers import map_layers
from fusion_bench_nufilt.layers import TargetConfig
from fusion_bench_nufilt.layerwise import Layers, LayerwiseMergingAlgorithm, split_plain


@auto_register_config
@takes_options(SpectralConfig, TargetConfig, ProtocolConfig)
class SpectralAccumulationAlgorithm(LayerwiseMergingAlgorithm):
    """Spectral accumulation, see :mod:`fusion_bench_nufilt.core.spectral`.

    Args:
        **kwargs: options of :class:`fusion_bench_nufilt.core.spectral.SpectralConfig`,
            :class:`fusion_bench_nufilt.layers.TargetConfig` and
            :class:`fusion_bench_nufilt.continual.ProtocolConfig`.

    Raises:
        ValueError: a value out of its range, or an option that there is not; names it.
    """

    def __init__(self, **kwargs: Any) -> None:
        (self.spectral_config, self.targets), protocol = split_plain([SpectralConfig, TargetConfig], kwargs)
        super().__init__(**protocol)

    def start(self, pretrained: torch.nn.Module, names: list[str]) -> None:
        super().start(pretrained, names)
        self._votes: dict[str, Votes] = {}

    def describe(self) -> dict[str, Any]:
        votes = {layer: dataclasses.astuple(votes) for layer, votes in self._votes.items()}
        return {**super().describe(), "votes": votes}

    def take_up(self, manifest: Mapping[str, Any]) -> None:
        if "votes" not in manifest:
            raise ValueError("the merged model has no votes recorded: it was not made by spectral accumulation")
        self._votes = {layer: Votes(*votes) for layer, votes in manifest["votes"].items()}

    def fuse(
        self, step: int, pretrained: Layers, merged: Layers, task: Layers
    ) -> Iterator[tuple[str, Tensor, SpectralReport]]:
        kappas, device = strengths(list(merged), self.spectral_config), self.fabric.device

        @torch.no_grad()
        def solve(layer: str) -> tuple[str, Tensor, SpectralReport]:
            theta_0, theta, theta_t = (weights[layer].to(device) for weights in (pretrained, merged, task))
            votes, damp = self._votes.get(layer, Votes()), self.spectral_config.damp
            try:
                weight, report = accumulate_layer(theta_0, theta, theta_t, votes, kappas[layer], damp)
            except ValueError as error:
                raise ValueError(f"layer '{layer}': {error}") from error
            return layer, weight.to(merged[layer].device), report

        for layer, weight, report in map_layers(solve, list(merged), device):
            self._votes[layer] = Votes(report.mean, report.count)
            yield layer, weight, report
