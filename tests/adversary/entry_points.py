"""How bad input is made of good files and options.

A case spoils one field of one good file, or one option, and runs the command in this process. All
outcomes but those in ``FINE`` are faults.
"""

import contextlib
import io
import json
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
#: What the entry points themselves write: results, locks, and the files that are made wrong.
OWN = re.compile(
    r"(run|comparison|analysis|merge)/(index\.html|.*\.(png|pdf|md|tex)|(accuracy_matrix|results)\.csv)|"
    r"store/.*|new/.*|recipe\.yaml|(.*/)?\.nufilt\.lock"
)


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
    quick: bool = True


def spoilt(case: Case, folder: Path) -> str:
    """Run a case and return its outcome, or which files it changed that no entry point may."""
    others = _stamps(folder)
    with in_time():
        outcome = case.run(folder)
    after = _stamps(folder)
    changed_files = [path for path, stamp in others.items() if after.get(path) != stamp]
    if changed_files:
        return f"foreign files: {', '.join(changed_files)} changed or deleted"
    return outcome


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Return sizes and times of change of all files that no entry point may write to."""
    stamps = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_file() and not OWN.fullmatch(name):
            stamps[name] = (path.stat().st_size, path.stat().st_mtime_ns)
    return stamps


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


# --- JSON, YAML and CSV ---


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


def kind(value: Any) -> str:
    if type(value) in (int, float) and math.isfinite(value):
        return "number"
    return type(value).__name__


@contextlib.contextmanager
def in_place_of(file: Path, text: str) -> Iterator[None]:
    good, stat = file.read_bytes(), file.stat()
    file.write_text(text)
    try:
        yield
    finally:
        file.write_bytes(good)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def json_cases(
    entry_point: str,
    file: str,
    content: Any,
    read: tuple[str, ...],
    use: Callable[[Path, bool], str],
) -> Iterator[Case]:
    """Every field of a JSON file times every value; those below ``read`` must keep their kind,
    unless null is a score.
    """
    for place in places(content):
        old = content
        for key in place:
            old = old[key]
        for name, value in VALUES.items():
            if value is old or (value == old and type(value) is type(old)):
                continue
            typed = re.fullmatch("|".join(read), ".".join(map(str, place))) is not None
            wrong = typed and (
                kind(value) != kind(old) or (value == 1e308 and isinstance(old, float))
            )
            wrong &= not (value is None and isinstance(old, float)) and not (
                value is ... and isinstance(place[-1], int)
            )

            def run(
                folder: Path, place: Any = place, value: Any = value, wrong: bool = wrong
            ) -> str:
                with in_place_of(folder / file, json.dumps(changed(content, place, value))):
                    return use(folder, wrong)

            title = f"{file}, {'.'.join(map(str, place))}: {name}"
            yield Case(
                entry_point, title, run, wrong or "report" not in entry_point
            )  # a page takes a second


def table_cases(entry_point: str, file: str, rows: list[str], folder_name: str) -> Iterator[Case]:
    """Every column of a CSV file times every value, and without the column."""
    header = rows[0].split(",")
    for column, title in enumerate(header):
        for name, value in {**VALUES, "no column": None}.items():
            cells = [row.split(",") for row in rows]
            if name == "no column":
                cells = [row[:column] + row[column + 1 :] for row in cells]
            else:
                text = (
                    ""
                    if value in (None, ...)
                    else json.dumps(value)[:50].replace('"', "").replace(",", ";")
                )
                cells[-1][column] = text

            def run(folder: Path, text: str = "\n".join(map(",".join, cells)) + "\n") -> str:
                with in_place_of(folder / file, text):
                    return nufilt("report", str(folder / folder_name), names=".")

            yield Case(entry_point, f"{file}, {title}: {name}", run, False)


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
