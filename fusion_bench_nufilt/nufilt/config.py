"""Hyper-parameters of a merging step."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fusion_bench_nufilt.utils.options import (
    check_choices,
    check_positive,
    check_whole,
    is_number,
    option,
)


class Ranks(NamedTuple):
    """The ranks in one layer, as numbers of directions."""

    null: int  # r_p
    lora: int  # r_l
    task: int  # r_v


@dataclass(frozen=True)
class FusionConfig:
    """NUFILT's settings, the same for all models and task orders; the defaults are the paper's or
    its authors'.

    Field names are the YAML keys of ``method=nufilt``, and peft's where peft has one. A rank is a
    whole number, or a share of a layer's input width between 0 and 1, see :meth:`ranks`.
    ``null_rank`` and ``task_rank`` are clipped to ``min(d_o, d_i)`` of a layer.

    Raises:
        ValueError: a value is out of its range; the message names the key.
    """

    null_rank: int | float = option(
        128,
        "Number of directions of the merged update that the filter protects. Like the other two "
        "ranks, a number "
        "between 0 and 1 is a share of the layer's input width.",
        symbol="r_p",
    )
    lora_rank: int | float = option(64, "Rank of the adapter BA; 0 means no adapter.", symbol="r_l")
    task_rank: int | float = option(
        8,
        "Number of directions of the new task that the adapter is trained to keep; 0 means no "
        "adapter.",
        symbol="r_v",
    )
    lr: float = option(1e-3, "Learning rate of Adam.")
    max_steps: int = option(50, "Number of Adam steps.")
    init_std: float = option(
        0.02,
        "Standard deviation of the adapter's initial A; B starts at zero.",
        symbol="σ_init",
    )
    null_space: bool | Literal["zero"] = option(
        True,
        "The projector. true: P = I - V_p V_p^T. false: P = I, the filter off as in the authors' "
        "code. zero: P = 0, "
        "as the paper prints that ablation.",
        symbol="P",
    )
    first_task: Literal["paper", "release"] = option(
        "paper",
        "paper takes the first model's layers whole; release drops its first r_p input "
        "coordinates, as the authors' released run does.",
    )
    solver: Literal["adam", "closed_form"] = option(
        "adam",
        "How the adapter is found: by the paper's steps of Adam, or in closed form, without lr and "
        "max_steps.",
    )
    ridge: float = option(
        10.0,
        "Ridge of closed_form; a larger one restores less of the new task and forgets less.",
        symbol="λ",
    )

    def __post_init__(self) -> None:
        for key in ("null_rank", "lora_rank", "task_rank"):
            if not (is_number(value := getattr(self, key)) and 0 < value < 1):
                most = (
                    2**16 if key == "lora_rank" else 2**31
                )  # unlike the others, it is not clipped to the layer
                check_whole(
                    self,
                    key,
                    most=most,
                    otherwise="or a share of the layer's width between 0 and 1",
                )
        check_whole(self, "max_steps")
        check_positive(self, "lr", "ridge")
        if not (is_number(self.init_std) and self.init_std >= 0):
            raise ValueError(f"init_std must be a number >= 0, got {self.init_std!r}")
        check_choices(self)

    @property
    def has_adapter(self) -> bool:
        """Whether a merge trains an adapter, whatever the layer's width."""
        return self.lora_rank > 0 and self.task_rank > 0

    def ranks(self, d_i: int) -> Ranks:
        """Return the ranks in a layer with ``d_i`` inputs; a share is rounded to a whole number, at
        least 1.
        """

        def number(rank: int | float) -> int:
            return int(rank) if rank >= 1 or rank == 0 else max(1, round(rank * d_i))

        return Ranks(number(self.null_rank), number(self.lora_rank), number(self.task_rank))
