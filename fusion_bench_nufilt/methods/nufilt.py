"""NUFILT, null-space filtering, as a layer-wise method."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fusion_bench_nufilt.nufilt.config import FusionConfig
from fusion_bench_nufilt.nufilt.fusion import Layers, TaskLayers, fuse_each
from fusion_bench_nufilt.nufilt.step import working_bytes
from fusion_bench_nufilt.utils.devices import Devices, stack_size
from fusion_bench_nufilt.utils.options import EntryPoint, as_typed

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
        strength: float = 1.0,
    ) -> Iterator[Added]:
        """Solve layers of equal shape together, as :func:`fusion_bench_nufilt.nufilt.fuse_each`
        does.
        """
        merged, seed = {layer: state["weight"] for layer, state in states.items()}, self.seed
        each = fuse_each(
            pretrained,
            merged,
            task,
            self.options,
            seed=seed,
            step=step,
            device=device,
            batch_bytes=BATCH_BYTES,
        )
        for layer, weight, report in each:
            yield layer, {"weight": weight}, dataclasses.asdict(report)

    def warning(self, shapes: Sequence[tuple[int, int]], entry_point: EntryPoint) -> str | None:
        rank = self.options.null_rank
        covered = sum(2 * min(self.options.ranks(d_i).null, d_i) > d_i for _, d_i in shapes)
        if self.options.null_space is not True or 2 * covered <= len(shapes):
            return None
        ranks = as_typed(entry_point, {"null_rank": 0.1667, "lora_rank": 0.0833}, method="nufilt")
        return (
            f"null_rank={rank} covers more than half of the inputs of {covered} of {len(shapes)} "
            "layers. Unless all linear layers are merged, little of a later task gets in; the "
            f"paper's ranks as shares of the width are {ranks}"
        )

    def working_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return working_bytes(shape, itemsize, self.options)

    def solved_together(self, shape: tuple[int, ...], itemsize: int, where: torch.device) -> int:
        return stack_size(self.working_bytes(shape, itemsize), where, BATCH_BYTES)
