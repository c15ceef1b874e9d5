"""Spectral accumulation as a FusionBench algorithm. Ours, not the paper's."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from fusion_bench import auto_register_config
from torch import Tensor

from fusion_bench_nufilt.continual import ProtocolConfig
from fusion_bench_nufilt.continual.layerwise import Layers, LayerwiseMergingAlgorithm, split_plain
from fusion_bench_nufilt.core.options import takes_options
from fusion_bench_nufilt.core.spectral import SpectralConfig, SpectralReport, Votes, accumulate_each, strengths
from fusion_bench_nufilt.layers import TargetConfig


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
        config = self.spectral_config
        votes = {layer: self._votes.get(layer, Votes()) for layer in merged}
        kappas = strengths(list(merged), config)
        each = accumulate_each(pretrained, merged, task, votes, kappas, config.damp, device=self.fabric.device)
        for layer, weight, report in each:
            self._votes[layer] = Votes(report.mean, report.count)
            yield layer, weight, report
