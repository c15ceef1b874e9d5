"""Bad options of every command, generated from the options that there are."""

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.cli.analyze import analyze
from fusion_bench_nufilt.cli.compare import compare
from fusion_bench_nufilt.cli.merge import KINDS, merge
from fusion_bench_nufilt.methods import METHODS
from tests.adversary.entry_points import CODES, VALUES, Case, nufilt

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
MODELS = ("--base", "base", "--task", "task1", "--out", "out", "--dry-run")
#: Parameters of commands that are no options, or whose values are names of models and folders.
OTHERS = ("context", "words", "typed", "dry_run", "options", "overrides")
OTHERS += ("base", "tasks", "task", "out")


def option_cases() -> Iterator[Case]:
    """Every option of every command times every word."""
    for entry_point, command, arguments in (
        ("options of nufilt merge", merge, ("merge", *MODELS)),
        ("options of nufilt compare", compare, ("compare", "--out", "new", "--methods", "sum")),
        ("options of nufilt analyze", analyze, ("analyze", "--out", "new")),
    ):
        for name, parameter in inspect.signature(command).parameters.items():
            if name in OTHERS or "bool" in str(parameter.annotation):
                continue
            for word in WORDS:
                option = f"--{name.replace('_', '-')}={word}"
                words = (*arguments, option)
                yield Case(entry_point, repr(option)[:60], lambda _, words=words: nufilt(*words))


def method_with(option: str) -> str:
    """Return a method that has an option, if there is one."""
    for name, method in METHODS.items():
        if option in {field.name for field in dataclasses.fields(method.Options)}:
            return name
    return "nufilt"


def dry_run(recipe: str, *, wrong: bool = False) -> str:
    """Plan what a recipe says."""
    Path("recipe.yaml").write_text(recipe, encoding="utf-8", errors="surrogateescape")
    names = "recipe.yaml" if wrong else ""
    return nufilt("merge", "recipe.yaml", "--dry-run", names=names, wrong=wrong)


def recipe_cases() -> Iterator[Case]:
    """Every field of a recipe times every value, and options under settings, too."""
    options = dict.fromkeys(field.name for kind in KINDS for field in dataclasses.fields(kind))
    for name in ("base", "tasks", "merged", "out", "method", "settings", *options):
        good = {"base": "base", "tasks": ["task1"], "out": "out", "method": method_with(name)}
        for value_name, value in VALUES.items():
            recipes = {"top": {**good, name: value}}
            if value is ...:
                recipes = {"top": {key: old for key, old in good.items() if key != name}}
            elif name in options:
                recipes["settings"] = {**good, "settings": {name: value}}
            for place, recipe in recipes.items():
                text = yaml.safe_dump(recipe)
                title = f"{place}, {name}: {value_name}"
                yield Case("recipes", title, lambda _, text=text: dry_run(text))


BROKEN = {
    "deep": "[" * 10**5,
    "a circle": "base: &a {b: *a}",
    "a tag": "base: !!python/object/apply:os.system [echo]",
    "no UTF-8": "base: \udcff",
}


def broken_recipe_cases() -> Iterator[Case]:
    for name, text in BROKEN.items():
        yield Case("recipes", f"no YAML: {name}", lambda _, text=text: dry_run(text, wrong=True))


def made(name: str, value: Any) -> str:
    """Make an algorithm with an option; the outcome."""
    try:
        NufiltContinualMergingAlgorithm(**{name: value})
    except ValueError as error:
        return "refused" if name in str(error) and "\n" not in str(error) else f"unclear: {error}"
    except Exception as error:
        return f"tracebacks: {error!r}"
    return "accepted"


def algorithm_cases() -> Iterator[Case]:
    """Every option of `fusion_bench method=nufilt` times every value."""
    for name in list(inspect.signature(NufiltContinualMergingAlgorithm).parameters)[:-1]:
        for value_name, value in VALUES.items():
            if value is not ...:
                title = f"{name}: {value_name}"
                call = lambda _, name=name, value=value: made(name, value)  # noqa: E731
                yield Case("options of fusion_bench", title, call)


def cases() -> list[Case]:
    return [*broken_recipe_cases(), *option_cases(), *recipe_cases(), *algorithm_cases()]
