"""What the time of a run is spent on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

#: The seconds of a method are those of merging alone, and of its data if it needs any.
MERGING = "merging"
DATA = "setting up data"
LOADING = "loading models"
CHECKING = "checking models"
SAVING = "saving"
SCORING = "evaluating"


class Stopwatch:
    """Adds up seconds by what they are spent on. A part within another one counts for itself
    alone.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._parts: list[str] = []  # the innermost one comes last
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the seconds of the block for a part."""
        self._count()
        self._parts.append(name)
        self._seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self._count()
            self._parts.pop()

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of every part so far, in the order in which they were begun."""
        self._count()
        return dict(self._seconds)

    def _count(self) -> None:
        now = time.perf_counter()
        if self._parts:
            self._seconds[self._parts[-1]] += now - self._since
        self._since = now
