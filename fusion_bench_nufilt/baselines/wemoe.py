"""LoRA-WEMoE, the reference that has extra parameters and needs data."""

from typing import Any

import torch
from fusion_bench import auto_register_config
from torch import nn

from fusion_bench_nufilt.continual import ContinualMergingAlgorithm
from fusion_bench_nufilt.continual.stream import MERGED
from fusion_bench_nufilt.layers import check_model

from .experts import MixtureOfExperts, mixture_of
from .task_data import task_data


@auto_register_config
class LoRAWEMoE(ContinualMergingAlgorithm):
    r"""Weight-ensembling mixture of experts (Tang et al., ICML 2024, arXiv 2402.00433) with experts of low rank.

    Each task adds an expert to every MLP (:class:`fusion_bench_nufilt.baselines.experts.LowRankExperts`); every other
    parameter becomes :math:`\theta + \lambda \tau`. Then all rows of the gates are trained to make predictions on test
    data of the new task certain (least entropy), a few items of each class, whose labels are not used.

    Args:
        rank: of the experts.
        init_lambda: :math:`\lambda`, and the bias of a gate at its start.
        lr: of Adam.
        max_steps: steps of Adam, a batch each.
        batch_size: items in a batch.
        samples_per_class: test items of each class of the new task.
        batch_reduce: one gate for the whole batch, in place of one for each of its items.
        **kwargs: the protocol, see :class:`fusion_bench_nufilt.continual.ContinualMergingAlgorithm`.

    Raises:
        ValueError: the models are no CLIP vision towers and no T5, the task pool has no data of a task, or the run is
            to go on from an earlier one, which it can't.
    """

    # set by auto_register_config
    rank: int
    init_lambda: float
    lr: float
    max_steps: int
    batch_size: int
    samples_per_class: int
    batch_reduce: bool

    def __init__(
        self,
        rank: int = 64,
        init_lambda: float = 0.3,
        lr: float = 1e-4,
        max_steps: int = 50,
        batch_size: int = 16,
        samples_per_class: int = 5,
        batch_reduce: bool = True,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("resume"):
            raise ValueError(f"{self.name} can't go on with resume=true: its model grows at every step")
        super().__init__(**kwargs)

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        if self.first_step > 1:
            raise ValueError(f"{self.name} starts from the pretrained model, not from '{MERGED}'")
        self._mixture = mixture_of(
            pretrained, rank=self.rank, init_lambda=self.init_lambda, batch_reduce=self.batch_reduce
        )
        self._data = {name: task_data(self.name, self.taskpool, name) for name in names}

    def check_model(self, pretrained: nn.Module, model: nn.Module, name: str) -> None:
        check_model(pretrained, model, name=name)

    def merge_step(self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed + step)  # of the new gates
            self._mixture.add_expert(pretrained, task)
        device = next(merged.parameters()).device
        self._train_gates(self._mixture.to(self.fabric.device), name)
        return self._mixture.to(device)

    @torch.enable_grad()
    def _train_gates(self, mixture: MixtureOfExperts, task: str) -> None:
        mixture.requires_grad_(False)
        gates = [
            parameter.requires_grad_() for _, module in mixture.mixtures() for parameter in module.gate.parameters()
        ]
        self._data[task].make_certain(
            mixture,
            gates,
            lr=self.lr,
            steps=self.max_steps,
            batch_size=self.batch_size,
            per_class=self.samples_per_class,
            seed=self.seed,
        )
