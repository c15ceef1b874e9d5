"""How bad input is made of good files and options.

A case spoils one option and runs the command in this process. All outcomes but those in ``FINE``
are faults.
"""

import contextlib
import io
import math
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from typer.testing import CliRunner

from fusion_bench_nufilt.cli.app import app

FINE = ("refused", "accepted")
SECONDS = 120  # after which a case counts as a hang, on a busy machine too

CODES = "\x1b[31m\x07"
#: Wrong for almost any field; ``...`` removes it.
VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "a word": "text",
    "-1": -1,
    "0": 0,
    "1.5": 1.5,
    "7": 7,
    "NaN": math.nan,
    "infinite": math.inf,
    "1e308": 1e308,
    "10^30": 10**30,
    "[]": [],
    "[null]": [None],
    "[1]": [1],
    "{}": {},
    "{a: 1}": {"a": 1},
    "control codes": f"{CODES}</ScRiPt ><svg onload=x>",
    "a long word": "x" * 10**5,
    "nothing": ...,
}


class Hang(BaseException):
    """Raised where a case takes too long; no `except Exception` of the code under test stops it."""


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    def hang(number: int, frame: object) -> None:
        raise Hang(f"not done after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Case(NamedTuple):
    entry_point: str
    name: str
    run: Callable[[Path], str]  # on the folder with good inputs; returns an outcome


def nufilt(*arguments: str, names: str = "", wrong: bool = False) -> str:
    """Run a command: the outcome, where a refusal must name something, and what is wrong must be
    refused.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        result = CliRunner().invoke(app, list(arguments))
    text = result.output
    if not isinstance(result.exception, SystemExit | None) or "Traceback" in text:
        return f"tracebacks: {result.exception!r} {text[-300:]}"
    if CODES[:2] in text or CODES[-1] in text:
        return f"control codes: {text!r}"
    if result.exit_code == 0 or "it would run" in text:
        return f"accepted wrongly: {text[-300:]}" if wrong else "accepted"
    line = re.sub(r"\s+", " ", text)
    if ("error: " in line or "Error" in line) and names in line:
        return "refused"
    return f"unclear: {line[-400:]}"


# --- fields of files ---


def places(content: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every field; of lists and of names of one kind, the first one's."""
    if at:
        yield at
    if isinstance(content, dict):
        for key in [key for key in content if key.isidentifier()] or list(content)[:1]:
            yield from places(content[key], (*at, key))
    elif isinstance(content, list) and content:
        yield from places(content[0], (*at, 0))


def changed(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    content = deepcopy(content)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return content


@contextlib.contextmanager
def in_place_of(file: Path, text: str) -> Iterator[None]:
    good, stat = file.read_bytes(), file.stat()
    file.write_text(text)
    try:
        yield
    finally:
        file.write_bytes(good)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def sample(every: list[Case], count: int, seed: int) -> list[Case]:
    """Draw so many cases, as many of each entry point, if it has as many."""
    entry_points: dict[str, list[Case]] = {}
    for case in every:
        entry_points.setdefault(case.entry_point, []).append(case)
    draw = random.Random(seed)
    drawn = []
    for cases in entry_points.values():
        drawn += draw.sample(cases, min(count // len(entry_points), len(cases)))
    return drawn
