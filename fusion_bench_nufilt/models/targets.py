"""The options that say which layers are merged, and what happens to every other parameter."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from fusion_bench_nufilt.utils import options
from fusion_bench_nufilt.utils.options import check_choices

option = partial(options.option, panel="Layers")

OtherParams = Literal["pretrained", "first", "mean"]
OnShapeMismatch = Literal["error", "keep-base"]


@dataclass(frozen=True)
class TargetConfig:
    """Which layers are merged, and what happens to all other parameters; a ValueError names a bad
    key.
    """

    target_modules: str | Sequence[str] = option(
        "auto",
        "What is merged. auto: the authors' layers of CLIP (attention and fc1) and T5 (attention "
        "and feed-forward), "
        "and all projections in the blocks of other models. all-linear: every linear layer but the "
        "output head. A list "
        "has names of modules, whole or from a dot on; a string is a regular expression for the "
        "whole name.",
    )
    exclude_modules: str | Sequence[str] | None = option(
        None, "What is left out, named in the same way."
    )
    other_params: OtherParams = option(
        "pretrained",
        "Every other parameter: the pretrained model's (the authors' way), the first task's, or "
        "the tasks' mean.",
    )
    on_shape_mismatch: OnShapeMismatch = option(
        "error",
        "What to do if a tensor outside the merged layers, such as embeddings, has another shape "
        "than the pretrained "
        "model's: refuse the model, or keep the pretrained tensor.",
    )
    heads: str = option(
        "auto",
        "Classifiers' heads, kept for each task. auto: those with other labels, or that the "
        "pretrained model lacks; "
        "none: no heads; anything else is a regular expression for the modules' names.",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        _check_patterns("target_modules", self.target_modules)
        _check_patterns("heads", self.heads)
        if self.exclude_modules is not None:
            _check_patterns("exclude_modules", self.exclude_modules)

    def changes_others(self, step: int) -> bool:
        """Return whether the task of a step (from 1) changes the parameters outside the merged
        layers.
        """
        return self.other_params == "mean" or (self.other_params == "first" and step == 1)


def exclude_hint(layer: str) -> str:
    """Return the end of a message about a layer that only some of the models have."""
    return f"; exclude_modules=[{layer}] leaves it out"


def _check_patterns(key: str, value: object) -> None:
    """Raise a ValueError unless a pattern is one regular expression or a list of words, none of
    them empty.
    """
    items = [value] if isinstance(value, str) else value
    if (
        not isinstance(items, Sequence)
        or not items
        or not all(isinstance(i, str) and i for i in items)
    ):
        raise ValueError(f"{key} must be a string or a list of strings, none empty, got {value!r}")
    if isinstance(value, str):
        matches(value, "", of=key)  # raises if it is not a regular expression


def matches(pattern: str, name: str, *, of: str) -> bool:
    """Tell whether an expression matches the whole of a name.

    Raises:
        ValueError: the pattern is no regular expression; the message names ``of``, its option.
    """
    try:
        return re.fullmatch(pattern, name) is not None
    # Deep nesting and huge counts of repeats raise other errors than re's own.
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{of}: {pattern!r} is no regular expression: {error}") from error
