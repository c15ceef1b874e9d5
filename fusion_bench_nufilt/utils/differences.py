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
    found: list[Difference] = []
    for key in {**stored, **wanted}:
        name, old, new = f"{prefix}{key}", stored.get(key), wanted.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{name}.")
        elif old != new:
            found.append(Difference(name, old, new))
    return found


def without_times(found: list[Difference]) -> list[Difference]:
    """Return the differences but those of the time of a file, whose content may be the same."""
    return [difference for difference in found if not difference.name.endswith(".time")]


def in_one_line(found: list[Difference]) -> str:
    return "; ".join(map(str, found[:3]))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
