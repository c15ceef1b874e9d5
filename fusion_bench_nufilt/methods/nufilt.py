"""NUFILT, null-space filtering, as a layer-wise method."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fusion_bench_nufilt.core.config import FusionConfig
from fusion_bench_nufilt.core.fusion import fuse_each
from fusion_bench_nufilt.core.stack import working_bytes
from fusion_bench_nufilt.core.weights import Layers, TaskLayers
from fusion_bench_nufilt.core.workers import Devices, stack_size

from .base import Added, LayerMethod, State, States

#: On an accelerator, layers of equal shape are solved together within about this much memory.
BATCH_BYTES = 4 * 2**30


class Nufilt(LayerMethod):
    """Null-space filtering (Qiu et al., ICLR 2026), whose state is the merged weight itself."""

    name = "nufilt"
    label = "NUFILT"
    citation = "null-space filtering ([Qiu et al., ICLR 2026](https://arxiv.org/abs/2509.21413))"
    Options = FusionConfig
    state_is_weight = True
    logged = ("task_norm", "merged_norm", "filtered_share", "overlap", "loss_before", "loss_after")

    options: FusionConfig

    def start(self, layer: str, theta_0: Tensor) -> State:
        return {"weight": theta_0}

    def weight(self, layer: str, state: State, theta_0: Tensor) -> Tensor:
        return state["weight"]

    def add_each(
        self,
        states: States,
        pretrained: Layers,
        task: TaskLayers,
        *,
        step: int,
        device: Devices | None = None,
        weigh: bool = False,
    ) -> Iterator[Added]:
        """Solve layers of equal shape together, as :func:`fusion_bench_nufilt.core.fuse_each` does."""
        merged, seed = {layer: state["weight"] for layer, state in states.items()}, self.seed
        each = fuse_each(
            pretrained, merged, task, self.options, seed=seed, step=step, device=device, batch_bytes=BATCH_BYTES
        )
        for layer, weight, report in each:
            yield layer, {"weight": weight}, dataclasses.asdict(report), weight

    def warning(self, shapes: Sequence[tuple[int, int]]) -> str | None:
        rank = self.options.null_rank
        covered = sum(2 * min(self.options.ranks(d_i).null, d_i) > d_i for _, d_i in shapes)
        if self.options.null_space is not True or 2 * covered <= len(shapes):
            return None
        return (
            f"null_rank={rank} covers more than half of the inputs of {covered} of {len(shapes)} layers. Unless all "
            "linear layers are merged, little of a later task gets in: null_rank=0.1667 lora_rank=0.0833 are the "
            "paper's ranks as shares of the width"
        )

    def working_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return working_bytes(shape, itemsize, self.options)

    def solved_together(self, shape: tuple[int, ...], itemsize: int, where: torch.device) -> int:
        return stack_size(self.working_bytes(shape, itemsize), where, BATCH_BYTES)

    def flops(self, shape: tuple[int, ...], ranks: Sequence[int | None]) -> float:
        d_o, d_i = shape
        return sum(self._flops_of_step(d_o, d_i, rank) for rank in ranks)

    def _flops_of_step(self, d_o: int, d_i: int, rank: int | None) -> float:
        """Estimate the operations of a step; an eigenvalue solver counts as the products that take as long."""
        options, ranks, smaller = self.options, self.options.ranks(d_i), min(d_o, d_i)
        outputs = min(rank, d_o, d_i) if rank else d_o  # tau has as many rows as its LoRA
        r_p, block = min(ranks.null, smaller), 2 * ranks.null + 16
        with_gram = d_i <= 2 * outputs
        flops = outputs * d_i**2 if with_gram else 0
        flops += d_o * d_i * smaller  # the Gram matrix of what is merged
        # V_p comes from block iteration or from a full solver.
        flops += 12 * smaller * block * (2 * smaller + 4 * block) if smaller >= max(256, 16 * r_p) else 10 * smaller**3
        flops += 4 * d_o * d_i * (r_p + 16) + 4 * outputs * d_i * r_p + 4 * outputs * d_i * ranks.lora
        height = d_i if with_gram else 2 * outputs
        rounds = options.max_steps if options.solver == "adam" else 2
        return flops + rounds * 2 * d_i * ranks.lora * (height + 2 * (r_p + ranks.task) + 2 * ranks.lora)

    @property
    def takes_first_whole(self) -> bool:
        return self.options.first_task == "paper"
