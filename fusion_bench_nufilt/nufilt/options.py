"""NUFILT's options: the paper's settings with their help, and the closed form's."""

from dataclasses import dataclass
from typing import Literal

from fusion_bench_nufilt.utils.options import check_choices, check_positive, option

from .config import StepConfig


@dataclass(frozen=True)
class FusionConfig(StepConfig):
    """NUFILT's settings, the same for all models and task orders; the defaults are the
    paper's or its authors'.

    Field names are the YAML keys of ``method=nufilt``, and peft's where peft has one. A
    rank is a whole number, or a share of a layer's input width between 0 and 1, see
    :meth:`ranks`. ``null_rank`` and ``task_rank`` are clipped to ``min(d_o, d_i)`` of a
    layer.

    Raises:
        ValueError: a value is out of its range; the message names the key.
    """

    null_rank: int | float = option(
        StepConfig.null_rank,
        "Number of directions of the merged update that the filter protects. Like the "
        "other two ranks, a number between 0 and 1 is a share of the layer's input "
        "width.",
        symbol="r_p",
    )
    lora_rank: int | float = option(
        StepConfig.lora_rank,
        "Rank of the adapter BA; 0 means no adapter.",
        symbol="r_l",
    )
    task_rank: int | float = option(
        StepConfig.task_rank,
        "Number of directions of the new task that the adapter is trained to keep; 0 "
        "means no adapter.",
        symbol="r_v",
    )
    lr: float = option(StepConfig.lr, "Learning rate of Adam.")
    max_steps: int = option(StepConfig.max_steps, "Number of Adam steps.")
    init_std: float = option(
        StepConfig.init_std,
        "Standard deviation of the adapter's initial A; B starts at zero.",
        symbol="σ_init",
    )
    null_space: bool | Literal["zero"] = option(
        StepConfig.null_space,
        "The projector. true: P = I - V_p V_p^T. false: P = I, the filter off as in "
        "the authors' code. zero: P = 0, as the paper prints that ablation.",
        symbol="P",
    )
    first_task: Literal["paper", "release"] = option(
        StepConfig.first_task,
        "paper takes the first model's layers whole; release drops its first r_p input "
        "coordinates, as the authors' released run does.",
    )
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
