"""Are these the inputs of before? A result is kept with a description of what it depends on, and
used again only if that description is still the same; otherwise, what differs is named.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Difference(NamedTuple):
    """A value of a description that is not the stored one."""

    name: str  # its keys, joined by dots
    stored: Any
    wanted: Any

    def __str__(self) -> str:
        if all(re.fullmatch(r"[0-9a-f]{64}", str(value)) for value in (self.stored, self.wanted)):
            return f"{self.name} is not the same"  # digests tell a reader nothing
        return f"{self.name} is {_short(self.stored)} there and {_short(self.wanted)} here"


def differences(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = ""
) -> list[Difference]:
    """Return what differs between the stored description of a result and that of the result that is
    wanted.
    """
    differing: list[Difference] = []
    for key in {**stored, **wanted}:  # in their order, which a set would not keep
        name = f"{prefix}{key}"
        old = stored.get(key)
        new = wanted.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            differing += differences(old, new, f"{name}.")
        elif old != new:
            differing.append(Difference(name, old, new))
    return differing


def without_times(differing: list[Difference]) -> list[Difference]:
    """Return the differences but those of the time of a file, whose content may be the same."""
    return [difference for difference in differing if not difference.name.endswith(".time")]


def in_one_line(differing: list[Difference]) -> str:
    """Name the first three differences."""
    return "; ".join(map(str, differing[:3]))


def _short(value: Any) -> str:
    text = json.dumps(value)
    if len(text) > 80:
        return f"{text[:77]}..."
    return text
