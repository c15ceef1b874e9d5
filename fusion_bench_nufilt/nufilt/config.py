"""Hyper-parameters of a merging step."""

import sys
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Ranks(NamedTuple):
    """The ranks in one layer, as numbers of directions."""

    null: int  # r_p
    lora: int  # r_l
    task: int  # r_v


@dataclass(frozen=True)
class StepConfig:
    """The paper's settings, the same for all models and task orders; the defaults are
    the paper's or its authors'.

    A rank is a whole number, or a share of a layer's input width between 0 and 1, see
    :meth:`ranks`. ``null_rank`` and ``task_rank`` are clipped to ``min(d_o, d_i)`` of a
    layer.

    Raises:
        ValueError: a value is out of its range; the message names the key.
    """

    null_rank: int | float = 128  # r_p: directions that the filter protects
    lora_rank: int | float = 64  # r_l: of the adapter BA; 0 means no adapter
    task_rank: int | float = 8  # r_v: directions of the task that the adapter keeps
    lr: float = 1e-3  # of Adam
    max_steps: int = 50  # of Adam
    init_std: float = 0.02  # standard deviation of the initial A; B starts at zero
    null_space: bool | Literal["zero"] = True  # P is I - V_p V_p^T, or I (False), or 0
    # taken whole, or without its first r_p input coordinates as in the released run
    first_task: Literal["paper", "release"] = "paper"

    def __post_init__(self) -> None:
        for key in ("null_rank", "lora_rank", "task_rank"):
            rank = getattr(self, key)
            is_share = _is_number(rank) and 0 < rank < 1
            if not is_share:
                # The others are clipped to the layer.
                most = 2**16 if key == "lora_rank" else 2**31
                _check_whole(
                    key, rank, most, ", or a share of the layer's width between 0 and 1"
                )
        _check_whole("max_steps", self.max_steps, 2**31)
        if not (_is_number(self.lr) and self.lr > 0):
            raise ValueError(f"lr must be a number > 0, got {self.lr!r}")
        if not (_is_number(self.init_std) and self.init_std >= 0):
            raise ValueError(f"init_std must be a number >= 0, got {self.init_std!r}")
        # 1 equals True, and is none of these.
        if not isinstance(self.null_space, bool) and self.null_space != "zero":
            raise ValueError(
                "null_space must be one of true, false, 'zero', "
                f"got {self.null_space!r}"
            )
        if self.first_task not in ("paper", "release"):
            raise ValueError(
                f"first_task must be one of 'paper', 'release', got {self.first_task!r}"
            )

    @property
    def has_adapter(self) -> bool:
        """Whether a merge trains an adapter, whatever the layer's width."""
        return self.lora_rank > 0 and self.task_rank > 0

    def ranks(self, d_i: int) -> Ranks:
        """Return the ranks in a layer with ``d_i`` inputs; a share is rounded to a
        whole number, at least 1.
        """

        def number(rank: int | float) -> int:
            return int(rank) if rank >= 1 or rank == 0 else max(1, round(rank * d_i))

        return Ranks(
            number(self.null_rank), number(self.lora_rank), number(self.task_rank)
        )


def _is_number(value: object) -> bool:
    """Tell whether a value is a finite number; True and False are not."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max  # an int may exceed it


def _check_whole(key: str, value: Any, most: int, otherwise: str = "") -> None:
    """Raise a ValueError if a value is not a whole number from 0 to ``most``;
    ``otherwise`` says what else it may be.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if is_whole and 0 <= value <= most:
        return
    bound = f" and <= {most}" if is_whole and value > most else ""
    raise ValueError(
        f"{key} must be a whole number >= 0{bound}{otherwise}, got {value!r}"
    )
