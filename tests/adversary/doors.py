"""Bad input of every door but `nufilt merge`'s checkpoints, generated from the files and options that are read.

A case spoils one field of one good file, or one option, and runs the command in this process. The outcomes are counted
by door; all but those in ``FINE`` are faults.
"""

import contextlib
import dataclasses
import inspect
import io
import json
import math
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from typer.testing import CliRunner

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.commands.analyze import analyze
from fusion_bench_nufilt.commands.app import app
from fusion_bench_nufilt.commands.compare import compare
from fusion_bench_nufilt.commands.merge import KINDS, merge
from fusion_bench_nufilt.compare.specs import RunSpec
from fusion_bench_nufilt.compare.store import Store
from fusion_bench_nufilt.methods import METHODS
from tests.compare.helpers import TASKS, finished

FINE = ("refused", "accepted")
OUTCOMES: dict[str, Counter[str]] = {}
SECONDS = 60  # of computing, or ten times that of waiting, after which a case counts as a hang

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
WORDS = ("", "text", "-1", "0", "1.5", "nan", "1e400", "9" * 400, "[1]", "{a:1}", f"'{CODES}'", CODES, "../..", "null")


class Hang(BaseException):
    """Raised where a case takes too long; no `except Exception` of the code under test stops it."""


class Case(NamedTuple):
    door: str
    name: str
    run: Callable[[Path], str]  # on the folder with good inputs; returns an outcome
    quick: bool = True


def spoilt(case: Case, folder: Path) -> str:
    """Run a case and count its outcome."""

    def hang(number: int, frame: object) -> None:
        raise Hang

    before = {number: signal.signal(number, hang) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS)
    try:
        outcome = case.run(folder)
    except Hang:
        outcome = "hangs"
    finally:
        for timer, number in ((signal.ITIMER_PROF, signal.SIGPROF), (signal.ITIMER_REAL, signal.SIGALRM)):
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])
    OUTCOMES.setdefault(case.door, Counter())[outcome.partition(":")[0]] += 1
    return outcome


def nufilt(*arguments: str, names: str = "", wrong: bool = False) -> str:
    """Run a command: the outcome, where a refusal must name something, and what is wrong must be refused."""
    with contextlib.redirect_stdout(io.StringIO()):
        result = CliRunner().invoke(app, list(arguments))
    text = result.output
    if not isinstance(result.exception, SystemExit | None) or "Traceback" in text:
        return f"tracebacks: {result.exception!r} {text[-300:]}"
    if CODES[:2] in text or CODES[-1] in text:
        return f"control codes on the terminal: {text!r}"
    if result.exit_code == 0 or "it would run" in text:
        return f"accepted wrongly: {text[-300:]}" if wrong else "accepted"
    line = re.sub(r"\s+", " ", text)
    return "refused" if ("error: " in line or "Error" in line) and names in line else f"unclear: {line[-400:]}"


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
    return "number" if type(value) in (int, float) and math.isfinite(value) else type(value).__name__


@contextlib.contextmanager
def in_place_of(file: Path, text: str) -> Iterator[None]:
    good = file.read_bytes()
    file.write_text(text)
    try:
        yield
    finally:
        file.write_bytes(good)


def json_cases(
    door: str, file: str, content: Any, read: tuple[str, ...], use: Callable[[Path, bool], str]
) -> Iterator[Case]:
    """Every field of a JSON file times every value; those below ``read`` must keep their kind, unless null is a score.

    The file comes as from an older version, without a digest; with its digest, nothing at all may be changed.
    """
    for place in places(content):
        old = content
        for key in place:
            old = old[key]
        if place[0] == "digest":
            continue
        for name, value in VALUES.items():
            if value is old or (value == old and type(value) is type(old)):
                continue
            typed = re.fullmatch("|".join(read), ".".join(map(str, place))) is not None
            wrong = typed and (kind(value) != kind(old) or (value == 1e308 and isinstance(old, float)))
            wrong &= not (value is None and isinstance(old, float)) and not (
                value is ... and isinstance(place[-1], int)
            )
            for sealed in (False, True) if name in ("7", "a word") and "digest" in content else (False,):

                def run(
                    folder: Path, place: Any = place, value: Any = value, wrong: bool = wrong, sealed: bool = sealed
                ) -> str:
                    new = changed(content, place, value)
                    if not sealed:
                        new.pop("digest", None)
                    with in_place_of(folder / file, json.dumps(new)):
                        return use(folder, wrong or sealed)

                title = f"{file}, {'.'.join(map(str, place))}: {name}{', with its digest' if sealed else ''}"
                yield Case(door, title, run, wrong or sealed or "report" not in door)  # a page takes a second


def table_cases(door: str, file: str, rows: list[str], folder_name: str) -> Iterator[Case]:
    """Every column of a CSV file times every value, and without the column."""
    header = rows[0].split(",")
    for column, title in enumerate(header):
        for name, value in {**VALUES, "no column": None}.items():
            cells = [row.split(",") for row in rows]
            if name == "no column":
                cells = [row[:column] + row[column + 1 :] for row in cells]
            else:
                text = "" if value in (None, ...) else json.dumps(value)[:50].replace('"', "").replace(",", ";")
                cells[-1][column] = text

            def run(folder: Path, text: str = "\n".join(map(",".join, cells)) + "\n") -> str:
                with in_place_of(folder / file, text):
                    return nufilt("report", str(folder / folder_name), names=".")

            yield Case(door, f"{file}, {title}: {name}", run, False)


# --- options ---

_MODELS = ("--base", "base", "--task", "task1", "--out", "out", "--dry-run")
_OTHERS = ("context", "words", "typed", "dry_run", "options", "overrides", "base", "tasks", "task", "out")


def option_cases() -> Iterator[Case]:
    """Every option of every command times every word."""
    for door, command, arguments in (
        ("options of nufilt merge", merge, ("merge", *_MODELS)),
        ("options of nufilt compare", compare, ("compare", "--out", "new")),
        ("options of nufilt analyze", analyze, ("analyze", "--out", "new")),
    ):
        for name, parameter in inspect.signature(command).parameters.items():
            if name in _OTHERS or parameter.annotation is bool or "bool" in str(parameter.annotation):
                continue
            for word in WORDS:
                option = f"--{name.replace('_', '-')}={word}"
                yield Case(door, repr(option)[:60], lambda _, option=option, a=arguments: nufilt(*a, option))


def recipe_cases() -> Iterator[Case]:
    """Every field of a recipe times every value, beside the models and under settings."""
    options = dict.fromkeys(field.name for kind in KINDS for field in dataclasses.fields(kind))
    for name in ("base", "tasks", "merged", "out", "method", "settings", *options):
        method = next((m for m, k in METHODS.items() if name in {f.name for f in dataclasses.fields(k.Options)}), None)
        base = {"base": "base", "tasks": ["task1"], "out": "out", "method": method or "nufilt"}
        for value_name, value in VALUES.items():
            for where in ("top", "settings") if name in options else ("top",):
                new = {**base, name: value} if where == "top" else {**base, "settings": {name: value}}
                new = {key: value for key, value in new.items() if value is not ...}
                text = yaml.safe_dump(new if new.get("settings") != {name: ...} else base)

                def run(folder: Path, text: str = text) -> str:
                    (folder / "recipe.yaml").write_text(text)
                    return nufilt("merge", "recipe.yaml", "--dry-run")

                yield Case("recipes", f"{where}, {name}: {value_name}", run)


BOMBS = {
    "laughs": "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9)).replace("*a0", "ha"),
    "a circle": "base: &a {b: *a}",
    "a large alias": f"base: &a {'x' * 10**4}\ntasks: [{', '.join(['*a'] * 10**4)}]",
    "interpolations": "\n".join(f"a{i + 1}: ${{a{i}}}${{a{i}}}" for i in range(40)),
    "20 MB": f"base: {'x' * 2 * 10**7}",
    "many values": f"tasks: [{', '.join('x' * 10**5)}]",
    "deep": "[" * 10**5,
    "deep and closed": "[" * 10**4 + "]" * 10**4,
    "deep blocks": "\n".join(" " * i + "a:" for i in range(900)),
    "a tag": "base: !!python/object/apply:os.system [echo]",
    "no UTF-8": "base: \udcff",
}


def bomb_cases() -> Iterator[Case]:
    for name, text in BOMBS.items():

        def run(folder: Path, text: str = text) -> str:
            (folder / "recipe.yaml").write_text(text, encoding="utf-8", errors="surrogateescape")
            return nufilt("merge", "recipe.yaml", "--dry-run", names="recipe.yaml", wrong=True)

        yield Case("recipes", f"bomb: {name}", run)


def algorithm_cases() -> Iterator[Case]:
    """Every option of `fusion_bench method=nufilt` times every value."""
    for name in list(inspect.signature(NufiltContinualMergingAlgorithm).parameters)[:-1]:
        for value_name, value in VALUES.items():

            def run(_: Path, name: str = name, value: Any = value) -> str:
                try:
                    NufiltContinualMergingAlgorithm(**({} if value is ... else {name: value}))
                except ValueError as error:
                    return "refused" if name in str(error) and "\n" not in str(error) else f"unclear: {error}"
                except Exception as error:
                    return f"tracebacks: {error!r}"
                return "accepted"

            yield Case("options of fusion_bench", f"{name}: {value_name}", run)


SCORED = (r"methods\.\w+\.runs\.\d+\.(tasks|accuracy_matrix|merge_seconds)(\.0)*", r"(tasks|seeds)(\.0)?")
READ = {
    "run": ("accuracy_matrix.json", (r"(method|tasks|accuracy_matrix|merge_seconds)(\.0)*",)),
    "comparison": ("results.json", (*SCORED, r"references(\.\w+){0,2}")),
    "analysis": ("analysis.json", (r"(tasks|names|reading|task_rank)(\.0)?", r"vectors|overlap|energy")),
}


SETTINGS = {"modelpool": "p", "resolved": {}}
SPEC = RunSpec("NUFILT", ("method=nufilt",), "nufilt")
REFERENCES = {"pretrained": dict.fromkeys(TASKS, 0.25), "individual": dict.fromkeys(TASKS, 0.95)}


def opened(folder: Path, wrong: bool) -> str:
    """Go on from the comparison that is there, as `nufilt compare` does before it runs anything."""
    run = finished(42)
    try:
        with closing(Store(folder / "store", SETTINGS)) as store:
            store.load(SPEC, run.config, run.tasks or [])
            store.load_references(TASKS)
            store.identify({"a": "1"})
    except ValueError as error:
        return "refused" if "store" in str(error) and "\n" not in str(error) else f"unclear: {error}"
    except Exception as error:
        return f"tracebacks: {error!r}"
    return "accepted wrongly" if wrong else "accepted"


def store_cases(good: Path) -> Iterator[Case]:
    with closing(Store(good / "store", SETTINGS)) as store:
        store.save(SPEC, finished(42))
        store.save_references(REFERENCES)
        store.identify({"a": "1"})
    for file in ("compare.json", "references.json", "runs/NUFILT/42.json"):
        content, path = json.loads((good / "store" / file).read_text()), f"store/{file}"
        read = ("(config|tasks|accuracy_matrix)(\\.0)*|pretrained|individual|modelpool",)
        yield from json_cases("nufilt compare, kept runs", path, content, read, opened)


def cases(good: Path) -> list[Case]:
    """Return all cases for a folder with good inputs."""
    found: list[Case] = [*bomb_cases(), *option_cases(), *recipe_cases(), *algorithm_cases()]
    for name, (file, read) in READ.items():
        path = f"{name}/{file}"
        content = json.loads((good / path).read_text())

        def report_of(folder: Path, wrong: bool, name: str = name, file: str = file) -> str:
            return nufilt("report", str(folder / name), names=file, wrong=wrong)

        found += json_cases(f"nufilt report, {name}", path, content, read, report_of)
        for table in sorted((good / name).glob("*.csv")):
            if table.name in ("layers.csv", "task_vectors.csv", "losses.csv", "affinity.csv"):
                rows = table.read_text().splitlines()
                found += table_cases(f"nufilt report, {name}", f"{name}/{table.name}", rows, name)
    content = json.loads((good / "one" / "nufilt.json").read_text())
    content["layers"] = dict(list(content["layers"].items())[:1])
    for door, command in (
        ("a manifest as recipe", ("merge", "one/nufilt.json", "--dry-run", "--out", "out")),
        ("a manifest to go on from", ("merge", "--merged", "one", *_MODELS)),
    ):

        def merge_of(_: Path, wrong: bool, command: tuple[str, ...] = command) -> str:
            return nufilt(*command, wrong=wrong)

        found += json_cases(door, "one/nufilt.json", content, ("step|settings",), merge_of)
    return found + list(store_cases(good))


def report() -> str:
    names = sorted({outcome for counts in OUTCOMES.values() for outcome in counts}, key=lambda name: name not in FINE)
    lines = [f"{door:28}" + "".join(f"{counts[name]:7} {name}" for name in names) for door, counts in OUTCOMES.items()]
    return "\n".join(lines)


def sample(every: list[Case], of_each_door: int, seed: int) -> list[Case]:
    """Draw so many cases of each door, if it has as many."""
    doors: dict[str, list[Case]] = {}
    for case in every:
        doors.setdefault(case.door, []).append(case)
    draw = random.Random(seed)
    return [case for some in doors.values() for case in draw.sample(some, min(of_each_door, len(some)))]


def good_folder(folder: Path) -> Path:
    """Add what `nufilt report` reads to good inputs of a merge."""
    from tests.results.helpers import FOLDERS

    for name, make in FOLDERS.items():
        make(folder / name)
    os.makedirs(folder / "nothing")
    return folder
