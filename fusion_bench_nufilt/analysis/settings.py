"""The settings of an analysis."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from fusion_bench_nufilt.utils import options
from fusion_bench_nufilt.utils.options import check_choices, check_whole

#: The folder, inside that of an analysis, of what needs data and is recorded once.
MOMENTS = "moments"

#: The pairs that the paper draws, for its vision models and for Flan-T5.
PAPER_PAIRS = (
    "mnist:mnist,eurosat:resisc45,svhn:dtd",
    "glue-rte:glue-rte,glue-rte:glue-qnli,glue-rte:glue-sst2",
)

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
    pairs: str | None = option(
        None,
        "Pairs DATA:VECTOR of tasks whose affinities are drawn layer by layer, such as "
        "mnist:mnist,svhn:dtd. By "
        "default the paper's pairs if there are these tasks, or else a high, a moderate and a low "
        "one.",
    )
    seed: int = option(42, "Seed of the task order and of the samples drawn.")

    def __post_init__(self) -> None:
        check_whole(self, "data_rank", "task_rank", "samples", least=1)
        check_choices(self)
        if self.data_rank > self.task_rank:
            ranks = f"r_d = {self.data_rank} and r_v = {self.task_rank}"
            raise ValueError(
                "data_rank must not exceed task_rank, since the affinity can't reach 1 there: got "
                f"{ranks}"
            )

    def named_pairs(self, tasks: Sequence[str]) -> list[tuple[int, int]] | None:
        """Return the pairs as task numbers, or None for the default."""
        if self.pairs:
            return _task_numbers(self.pairs, tasks)
        for pairs in PAPER_PAIRS:
            try:
                return _task_numbers(pairs, tasks)
            except ValueError:  # the paper's pairs of another pool
                continue
        return None


def _task_numbers(text: str, tasks: Sequence[str]) -> list[tuple[int, int]]:
    """Read ``DATA:VECTOR, …``; a ValueError names a pair that is not one of tasks."""
    pairs = []
    for pair in text.replace(" ", "").split(","):
        names = pair.split(":")
        if len(names) != 2 or not set(names) <= set(tasks):
            raise ValueError(f"pairs must be DATA:VECTOR of {', '.join(tasks)}, got '{pair}'")
        pairs.append((tasks.index(names[0]), tasks.index(names[1])))
    return pairs
