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
        applies="rank_matters",
    )
    task_rank: int | float = option(
        StepConfig.task_rank,
        "Number of directions of the new task that the adapter is trained to keep; 0 "
        "means no adapter.",
        symbol="r_v",
    )
    lr: float = option(StepConfig.lr, "Learning rate of Adam.", applies="takes_steps")
    max_steps: int = option(
        StepConfig.max_steps, "Number of Adam steps.", applies="uses_adam"
    )
    init_std: float = option(
        StepConfig.init_std,
        "Standard deviation of the adapter's initial A; B starts at zero.",
        symbol="σ_init",
        applies="changes_adapter",
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
        applies="has_adapter",
    )
    ridge: float = option(
        10.0,
        "Ridge of closed_form; a larger one restores less of the new task and forgets "
        "less.",
        symbol="λ",
        applies="uses_closed_form",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "ridge")
        check_choices(self)

    @property
    def rank_matters(self) -> bool:
        """Whether another rank of the adapter would change anything: those that stay at
        B = 0 are the same at every rank, and none at all is reported otherwise.
        """
        if self.lora_rank == 0:
            return self.task_rank > 0
        return self.changes_adapter

    @property
    def uses_adam(self) -> bool:
        """Whether an adapter is trained by Adam."""
        return self.has_adapter and self.solver == "adam"

    @property
    def takes_steps(self) -> bool:
        """Whether Adam takes a step at all."""
        return self.uses_adam and self.max_steps > 0

    @property
    def uses_closed_form(self) -> bool:
        """Whether an adapter is found in closed form."""
        return self.has_adapter and self.solver == "closed_form"

    @property
    def changes_adapter(self) -> bool:
        """Whether the adapter becomes another than B = 0."""
        return self.takes_steps or self.uses_closed_form

    @property
    def draws(self) -> bool:
        """Whether the result depends on what is drawn at random."""
        return self.changes_adapter and self.init_std > 0
