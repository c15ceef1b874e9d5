"""LoRA-WEMoE, a reference method that adds parameters and needs data."""

from dataclasses import dataclass
from typing import Any

import torch
from fusion_bench import auto_register_config
from torch import nn

from fusion_bench_nufilt.continual import ContinualMergingAlgorithm, ProtocolConfig
from fusion_bench_nufilt.continual.stream import MERGED
from fusion_bench_nufilt.core.options import option, split_options, takes_options
from fusion_bench_nufilt.layers import check_model

from .experts import mixture_of
from .task_data import EntropyConfig, task_data


@dataclass(frozen=True)
class WEMoEConfig(EntropyConfig):
    """The experts, and how their gates are trained."""

    samples_per_class: int | None = option(5, "Items of each class that are used; null takes all.")
    rank: int = option(64, "Rank of the experts.")
    init_lambda: float = option(0.3, "Factor of all other parameters, and the bias of a gate at its start.", symbol="λ")
    batch_reduce: bool = option(True, "One gate for the whole batch instead of one for each of its items.")


@auto_register_config
@takes_options(WEMoEConfig, ProtocolConfig)
class LoRAWEMoE(ContinualMergingAlgorithm):
    r"""Weight-ensembling mixture of experts (Tang et al., ICML 2024, arXiv 2402.00433) with experts of low rank.

    Each task adds an expert to every MLP (:class:`fusion_bench_nufilt.baselines.experts.LowRankExperts`); every other
    parameter becomes :math:`\theta + \lambda \tau`. Then all rows of the gates are trained to make predictions on test
    data of the new task certain. The labels of the data only serve to draw a few items of each class.

    Args:
        **kwargs: options of :class:`WEMoEConfig` and :class:`fusion_bench_nufilt.continual.ProtocolConfig`.

    Raises:
        ValueError: the models are neither CLIP vision towers nor T5, the task pool has no data of a task, or the run
            is to go on from an earlier one, which it can't.
    """

    def __init__(self, **kwargs: Any) -> None:
        (self._options,), protocol = split_options([WEMoEConfig], kwargs)
        if protocol.get("resume"):
            raise ValueError(f"{self.name} can't go on with resume=true: its model grows at every step")
        super().__init__(**protocol)

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        if self.first_step > 1:
            raise ValueError(f"{self.name} starts from the pretrained model, not from '{MERGED}'")
        chosen = self._options
        self._mixture = mixture_of(
            pretrained, rank=chosen.rank, init_lambda=chosen.init_lambda, batch_reduce=chosen.batch_reduce
        )
        self._data = {name: task_data(self.name, self.taskpool, name) for name in names}

    def check_model(self, pretrained: nn.Module, model: nn.Module, name: str) -> None:
        check_model(pretrained, model, name=name)

    def merge_step(self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed + step)  # the new gates are drawn from it
            self._mixture.add_expert(pretrained, task)
        device = next(merged.parameters()).device
        mixture = self._mixture.to(self.fabric.device).requires_grad_(False)
        gates = [weight.requires_grad_() for _, module in mixture.mixtures() for weight in module.gate.parameters()]
        with torch.enable_grad():
            self._data[name].minimise_entropy(mixture, gates, self._options, self.seed)
        return mixture.to(device)
