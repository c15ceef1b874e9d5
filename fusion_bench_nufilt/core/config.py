"""Hyper-parameters of a merging step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

OtherParams = Literal["pretrained", "first", "mean"]
FirstTask = Literal["paper", "release"]
Solver = Literal["adam", "closed_form"]


@dataclass(frozen=True)
class FusionConfig:
    r"""The method's settings; the defaults are the paper's, one fixed setting for all models and orders.

    Field names are the YAML keys of ``method=nufilt`` and peft's where peft has one. Ranks above
    ``min(d_o, d_i)`` of a layer mean "all of it" for the two subspaces.

    Args:
        null_rank: r_p, directions of the merged update :math:`\tilde\tau` that the filter protects. 0: none.
        lora_rank: r_l, rank of the adapter. 0: no adapter, the ablation "filter only".
        task_rank: r_v, directions of the new task vector that the objective asks to keep. 0 leaves only the
            stability term, which BA = 0 already satisfies under the filter: the same as no adapter.
        lr: learning rate of Adam.
        max_steps: Adam steps; stopping before convergence is part of the method.
        init_std: standard deviation of the initial A (B starts at zero).
        null_space: the projector. ``True``: :math:`P = I - V_p V_p^\top`. ``False``: :math:`P = I`, the filter
            off as in the authors' code. ``"zero"``: :math:`P = 0`, the filter off as the paper's ablation
            prints it, so that a task enters through its adapter alone.
        target_modules: which linear layers are merged; see :func:`fusion_bench_nufilt.targets.select_layers`.
        exclude_modules: linear layers to leave out, in the same language.
        other_params: parameters outside the merged layers: ``pretrained`` keeps them (the authors' setting),
            ``first`` takes the first task's, ``mean`` their running mean over the tasks.
        first_task: ``paper`` takes the first model whole; ``release`` drops its first r_p input coordinates, as the
            authors' released run does.
        solver: how the adapter is found. ``adam`` is the paper's; ``closed_form`` solves a ridge problem instead, see
            :func:`fusion_bench_nufilt.core.adapter.solve_adapter`, and uses neither ``lr`` nor ``max_steps``.
        ridge: of ``closed_form``; larger restores less of what the filter took, and disturbs less of what was merged.

    Raises:
        ValueError: a value out of its range; the message names the key.
    """

    null_rank: int = 128
    lora_rank: int = 64
    task_rank: int = 8
    lr: float = 1e-3
    max_steps: int = 50
    init_std: float = 0.02
    null_space: bool | Literal["zero"] = True
    target_modules: str | Sequence[str] = "auto"
    exclude_modules: str | Sequence[str] | None = None
    other_params: OtherParams = "pretrained"
    first_task: FirstTask = "paper"
    solver: Solver = "adam"
    ridge: float = 10.0

    def __post_init__(self) -> None:
        for key in ("null_rank", "lora_rank", "task_rank", "max_steps"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{key} must be a whole number >= 0, got {value!r}")
        for key in ("lr", "ridge"):
            if not (_is_number(value := getattr(self, key)) and value > 0):
                raise ValueError(f"{key} must be a number > 0, got {value!r}")
        if not (_is_number(self.init_std) and self.init_std >= 0):
            raise ValueError(f"init_std must be a number >= 0, got {self.init_std!r}")
        if not (isinstance(self.null_space, bool) or self.null_space == "zero"):
            raise ValueError(f"null_space must be true, false or 'zero', got {self.null_space!r}")
        for key, options in (("other_params", OtherParams), ("first_task", FirstTask), ("solver", Solver)):
            if getattr(self, key) not in get_args(options):
                allowed = ", ".join(map(repr, get_args(options)))
                raise ValueError(f"{key} must be one of {allowed}, got {getattr(self, key)!r}")
        _check_patterns("target_modules", self.target_modules)
        if self.exclude_modules is not None:
            _check_patterns("exclude_modules", self.exclude_modules)


def _check_patterns(key: str, value: object) -> None:
    """A pattern is one non-empty string or a non-empty list of them."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not items or not all(isinstance(i, str) and i for i in items):
        raise ValueError(f"{key} must be a string or a list of strings, none empty, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
