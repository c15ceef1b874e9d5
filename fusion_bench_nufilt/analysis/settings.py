"""The settings of an analysis."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from fusion_bench_nufilt.utils import options
from fusion_bench_nufilt.utils.options import check_choices, check_whole

#: The folder, inside that of an analysis, of what needs data and is recorded once.
MOMENTS = "moments"

option = partial(options.option, panel="Analysis")


@dataclass(frozen=True)
class AnalysisConfig:
    """What is measured, and on how much data; a ValueError names a bad value."""

    data_rank: int = option(8, "Directions of each task's data, at most task_rank.", symbol="r_d")
    task_rank: int = option(8, "Directions of each task vector.", symbol="r_v")
    samples: int = option(
        1000, "Test samples of each task, drawn at random; all if there are fewer."
    )
    activations: Literal["own", "pretrained"] = option(
        "own", "The model whose layer inputs are recorded: each task's own, or the pretrained one."
    )
    seed: int = option(42, "Seed of the task order and of the samples drawn.")

    def __post_init__(self) -> None:
        check_whole(self, "data_rank", "task_rank", "samples")
        check_choices(self)
        if self.data_rank > self.task_rank:
            ranks = f"r_d = {self.data_rank} and r_v = {self.task_rank}"
            raise ValueError(
                "data_rank must not exceed task_rank, since the affinity can't reach 1 there: got "
                f"{ranks}"
            )
