"""Which methods and seeds are compared: what the words on the command line mean."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .configs import Methods

_MOST_SEEDS = 1000


@dataclass(frozen=True)
class RunSpec:
    """One row of the comparison.

    Args:
        label: its name in tables and pictures.
        overrides: of `fusion_bench`, beyond what all rows share.
        method: its method by name, without ``continual/``.
        settings: ``KEY=VALUE`` that differ from the method's configuration; part of the overrides.
    """

    label: str
    overrides: tuple[str, ...]
    method: str
    settings: tuple[str, ...] = ()

    @property
    def safe_label(self) -> str:
        """The label as a file name."""
        return re.sub(r"[^\w.=,+-]+", "_", self.label)


def parse_methods(text: str, methods: Methods) -> list[RunSpec]:
    """Methods from ``[LABEL=]NAME[:KEY=VALUE]…, …``; ``all`` stands for NUFILT and the data-free continual baselines.

    >>> [spec.label for spec in parse_methods("nufilt, NUFILT small=nufilt:null_rank=21:lora_rank=10", Methods())]
    ['nufilt', 'NUFILT small']

    Raises:
        ValueError: a method that does not exist (the message lists what there is), or a setting without a value.
    """
    specs = []
    for part in _split(text, ","):
        specs += [_spec(name, methods) for name in methods.all()] if part == "all" else [_spec(part, methods)]
    return specs


def _spec(text: str, methods: Methods) -> RunSpec:
    head, *settings = _split(text, ":")
    label, _, name = (part.strip() for part in head.rpartition("="))
    overrides = methods.resolve(name)
    placed = (methods.place(overrides, setting) for setting in settings)
    return RunSpec(label or text, (*overrides, *placed), name.removeprefix("continual/"), tuple(settings))


def _split(text: str, separator: str) -> list[str]:
    """Parts between separators that are not inside brackets, without blanks around them; empty ones dropped."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def check_specs(specs: Sequence[RunSpec]) -> None:
    """Refuse no rows at all, and rows that could not be told apart in tables or on disk."""
    if not specs:
        raise ValueError("there is no method to compare: choose some with --methods or --preset")
    by_file: dict[str, RunSpec] = {}
    for spec in specs:
        if (other := by_file.setdefault(spec.safe_label, spec)) is not spec:
            raise ValueError(f"methods '{other.label}' and '{spec.label}' need labels to tell them apart: LABEL=METHOD")


def parse_seeds(text: str) -> list[int]:
    """Seeds from numbers and half-open ranges, ``42``, ``42,45`` or ``42:52`` (42 to 51, the paper's ten orders)."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?::(\d{1,10}))?\s*", part)
        if not match:
            raise ValueError(f"seeds must be like 42, 42,45 or 42:52, got '{text}'")
        first, end = int(match[1]), int(match[2] or int(match[1]) + 1)
        if end <= first:
            raise ValueError(f"seeds '{part}': the range is empty; its end is not part of it")
        if end - first > _MOST_SEEDS:
            raise ValueError(
                f"seeds '{part}' are {end - first}, more than the {_MOST_SEEDS} that a comparison may have"
            )
        seeds += range(first, end)
    return list(dict.fromkeys(seeds))
