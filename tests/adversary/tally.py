"""What became of the bad inputs, counted."""

from collections import Counter

GOOD = ("cases", "clean refusals", "merged as if nothing were wrong", "kills", "kills resumed")
BAD = ("tracebacks", "hangs", "wrong results", "inputs or foreign files changed", "work folders damaged")
COUNTS: Counter[str] = Counter()


def expect(condition: object, otherwise: str, message: object = "") -> None:
    """Fail, and count what went wrong, unless the condition holds."""
    if not condition:
        COUNTS[otherwise] += 1
    assert condition, f"{otherwise}: {message}"


def as_table() -> list[str]:
    """A line for each count."""
    return [f"{name:32} {COUNTS[name]:6}" for name in (*GOOD, *BAD)]
