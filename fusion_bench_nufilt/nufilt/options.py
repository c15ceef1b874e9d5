"""NUFILT's options: the paper's settings, and those of the closed form."""

from dataclasses import dataclass
from typing import Literal

from fusion_bench_nufilt.utils.options import check_choices, check_positive, option

from .config import StepConfig


@dataclass(frozen=True)
class FusionConfig(StepConfig):
    """The settings of :class:`StepConfig`, and how the adapter is found. Field names
    are the YAML keys of ``method=nufilt``, and peft's where peft has one.

    Raises:
        ValueError: a value is out of its range; the message names the key.
    """

    solver: Literal["adam", "closed_form"] = option(
        "adam",
        "How the adapter is found: by the paper's steps of Adam, or in closed form, "
        "without lr and max_steps.",
    )
    ridge: float = option(
        10.0,
        "Ridge of closed_form; a larger one restores less of the new task and forgets "
        "less.",
        symbol="λ",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "ridge")
        check_choices(self)
