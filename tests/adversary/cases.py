"""Bad input of every entry point but `nufilt merge`'s checkpoints, generated from the files and
options that are read.
"""

import dataclasses
import inspect
import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml
from fusion_bench import BaseModelPool
from torch import nn

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.cli.analyze import analyze
from fusion_bench_nufilt.cli.compare import compare
from fusion_bench_nufilt.cli.merge import KINDS, merge
from fusion_bench_nufilt.compare.specs import RunSpec
from fusion_bench_nufilt.compare.store import Store
from fusion_bench_nufilt.continual.models import merged_before
from fusion_bench_nufilt.continual.run_folder import RunFolder
from fusion_bench_nufilt.methods import METHODS
from fusion_bench_nufilt.utils.manifest import save_checkpoint
from tests.adversary.entry_points import CODES, VALUES, Case, json_cases, nufilt, table_cases
from tests.compare.helpers import TASKS, finished
from tests.pages.helpers import FOLDERS

WORDS = (
    "",
    "text",
    "-1",
    "0",
    "1.5",
    "nan",
    "1e400",
    "9" * 400,
    "[1]",
    "{a:1}",
    f"'{CODES}'",
    CODES,
    "../..",
    "null",
)


# --- options ---

_MODELS = ("--base", "base", "--task", "task1", "--out", "out", "--dry-run")
_OTHERS = (
    "context",
    "words",
    "typed",
    "dry_run",
    "options",
    "overrides",
    "base",
    "tasks",
    "task",
    "out",
)


def option_cases() -> Iterator[Case]:
    """Every option of every command times every word."""
    for entry_point, command, arguments in (
        ("options of nufilt merge", merge, ("merge", *_MODELS)),
        ("options of nufilt compare", compare, ("compare", "--out", "new", "--methods", "sum")),
        ("options of nufilt analyze", analyze, ("analyze", "--out", "new")),
    ):
        for name, parameter in inspect.signature(command).parameters.items():
            if (
                name in _OTHERS
                or parameter.annotation is bool
                or "bool" in str(parameter.annotation)
            ):
                continue
            for word in WORDS:
                option = f"--{name.replace('_', '-')}={word}"
                yield Case(
                    entry_point,
                    repr(option)[:60],
                    lambda _, option=option, a=arguments: nufilt(*a, option),
                )


def recipe_cases() -> Iterator[Case]:
    """Every field of a recipe times every value, beside the models and under settings."""
    options = dict.fromkeys(field.name for kind in KINDS for field in dataclasses.fields(kind))
    for name in ("base", "tasks", "merged", "out", "method", "settings", *options):
        method = next(
            (
                m
                for m, k in METHODS.items()
                if name in {f.name for f in dataclasses.fields(k.Options)}
            ),
            None,
        )
        base = {"base": "base", "tasks": ["task1"], "out": "out", "method": method or "nufilt"}
        for value_name, value in VALUES.items():
            for where in ("top", "settings") if name in options else ("top",):
                new = (
                    {**base, name: value} if where == "top" else {**base, "settings": {name: value}}
                )
                new = {key: value for key, value in new.items() if value is not ...}
                text = yaml.safe_dump(new if new.get("settings") != {name: ...} else base)

                def run(folder: Path, text: str = text) -> str:
                    (folder / "recipe.yaml").write_text(text)
                    return nufilt("merge", "recipe.yaml", "--dry-run")

                yield Case("recipes", f"{where}, {name}: {value_name}", run)


BROKEN = {
    "deep": "[" * 10**5,
    "a circle": "base: &a {b: *a}",
    "a tag": "base: !!python/object/apply:os.system [echo]",
    "no UTF-8": "base: \udcff",
}


def broken_recipe_cases() -> Iterator[Case]:
    for name, text in BROKEN.items():

        def run(folder: Path, text: str = text) -> str:
            (folder / "recipe.yaml").write_text(text, encoding="utf-8", errors="surrogateescape")
            return nufilt("merge", "recipe.yaml", "--dry-run", names="recipe.yaml", wrong=True)

        yield Case("recipes", f"no YAML: {name}", run)


def algorithm_cases() -> Iterator[Case]:
    """Every option of `fusion_bench method=nufilt` times every value."""
    for name in list(inspect.signature(NufiltContinualMergingAlgorithm).parameters)[:-1]:
        for value_name, value in VALUES.items():

            def run(_: Path, name: str = name, value: Any = value) -> str:
                return tried(
                    lambda: NufiltContinualMergingAlgorithm(
                        **({} if value is ... else {name: value})
                    ),
                    name,
                    False,
                )

            yield Case("options of fusion_bench", f"{name}: {value_name}", run)


SCORED = (
    r"methods\.\w+\.runs\.\d+\.(tasks|accuracy_matrix|merge_seconds)(\.0)*",
    r"(tasks|seeds)(\.0)?",
)
READ = {
    "run": ("accuracy_matrix.json", (r"(method|tasks|accuracy_matrix|merge_seconds)(\.0)*",)),
    "comparison": ("results.json", (*SCORED, r"references(\.\w+){0,2}")),
    "analysis": (
        "analysis.json",
        (r"(tasks|names|reading|task_rank)(\.0)?", r"vectors|overlap|energy"),
    ),
}


SETTINGS = {"modelpool": "p", "resolved": {}}
SPEC = RunSpec("NUFILT", ("method=nufilt",), "nufilt")
REFERENCES = {"pretrained": dict.fromkeys(TASKS, 0.25), "individual": dict.fromkeys(TASKS, 0.95)}


def tried(use: Callable[[], object], names: str, wrong: bool) -> str:
    """Call what a command calls; the outcome."""
    try:
        done = use()
    except ValueError as error:
        return "refused" if names in str(error) and "\n" not in str(error) else f"unclear: {error}"
    except Exception as error:
        return f"tracebacks: {error!r}"
    return "refused" if done is None else "accepted wrongly" if wrong else "accepted"


def opened(folder: Path, wrong: bool) -> str:
    """Go on from the comparison that is there, as `nufilt compare` does before it runs anything."""

    def use() -> bool:
        run = finished(42)
        with closing(Store(folder / "store", SETTINGS)) as store:
            store.load(SPEC, run.config, run.tasks or [])
            store.load_references(TASKS)
            store.identify({"a": "1"})
        return True

    return tried(use, "store", wrong)


def store_cases(good: Path) -> Iterator[Case]:
    with closing(Store(good / "store", SETTINGS)) as store:
        store.save(SPEC, finished(42))
        store.save_references(REFERENCES)
        store.identify({"a": "1"})
    for file in ("compare.json", "references.json", "runs/NUFILT/42.json"):
        content, path = json.loads((good / "store" / file).read_text()), f"store/{file}"
        read = ("(config|tasks|accuracy_matrix)(\\.0)*|pretrained|individual|modelpool",)
        yield from json_cases("nufilt compare, kept runs", path, content, read, opened)


STEP = {"step": 1, "tasks": ["a"], "order": ["a", "b"], "merge_seconds": [0.5], "method": "NUFILT"}
RUN = {
    "settings": {"seed": 42, "null_rank": 8},
    "inputs": {"_pretrained_": {"name": "_pretrained_", "fingerprint": "0", "loaded": "0"}},
}


def step_cases(good: Path) -> Iterator[Case]:
    """Every field of a step that `fusion_bench` goes on from, in its log directory and as
    `_merged_`.
    """
    folder = good / "steps" / "checkpoints" / "merged_model_0"
    save_checkpoint(nn.Linear(2, 2), folder, {**STEP, **RUN}, {})

    def log_directory(good: Path, wrong: bool) -> str:
        run = {"method": "NUFILT", "order": ["a", "b"], **RUN}

        def go_on() -> object:
            run_folder = RunFolder(good / "steps")
            run_folder.refuse_other_run(run)
            return run_folder.newest_step(1, 1)

        return tried(go_on, "steps", wrong)

    def merged(good: Path, wrong: bool) -> str:
        models = {
            "_pretrained_": "x",
            "c": "y",
            "_merged_": str(good / "steps/checkpoints/merged_model_0"),
        }
        wrong &= content.keys() <= json.loads((good / file).read_text()).keys()  # or of another
        return tried(
            lambda: merged_before(BaseModelPool(models), None, verify=True), "merged_", wrong
        )

    file = str((folder / "nufilt.json").relative_to(good))
    content = json.loads((good / file).read_text())
    typed = ("step|settings|inputs|files",)
    for entry_point, use in (("path.log_dir", log_directory), ("_merged_", merged)):
        yield from json_cases(entry_point, file, content, typed, use)


def cases(good: Path) -> list[Case]:
    """Return all cases for a folder with good inputs."""
    found: list[Case] = [
        *broken_recipe_cases(),
        *option_cases(),
        *recipe_cases(),
        *algorithm_cases(),
    ]
    for name, (file, read) in READ.items():
        path = f"{name}/{file}"
        content = json.loads((good / path).read_text())

        def report_of(folder: Path, wrong: bool, name: str = name, file: str = file) -> str:
            return nufilt("report", str(folder / name), names=file, wrong=wrong)

        found += json_cases(f"nufilt report, {name}", path, content, read, report_of)
        for table in (good / name).glob("layers.csv"):
            rows = table.read_text().splitlines()
            found += table_cases(f"nufilt report, {name}", f"{name}/{table.name}", rows, name)
    content = json.loads((good / "one" / "nufilt.json").read_text())
    content["layers"] = dict(list(content["layers"].items())[:1])

    def go_on(_: Path, wrong: bool) -> str:
        return nufilt("merge", "--merged", "one", *_MODELS, wrong=wrong)

    typed = ("step|settings",)
    found += json_cases("a manifest to go on from", "one/nufilt.json", content, typed, go_on)
    return [*found, *store_cases(good), *step_cases(good)]


def good_folder(folder: Path) -> Path:
    """Add what `nufilt report` reads to good inputs of a merge."""
    for name, make in FOLDERS.items():
        make(folder / name)
        (folder / name / "notes.txt").write_text("precious")
    os.makedirs(folder / "nothing")
    return folder
