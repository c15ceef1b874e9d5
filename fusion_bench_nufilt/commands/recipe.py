"""What to merge and how, from a recipe file, from KEY=VALUE words and from typed options; later sources win."""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BeforeValidator
from typing_extensions import TypedDict
from yaml import YAMLError

from fusion_bench_nufilt.compare.overrides import key_value
from fusion_bench_nufilt.core.options import unknown_option
from fusion_bench_nufilt.storage.json_files import Count, checked, parse_json

MODELS = ("base", "tasks", "merged", "out")
_TASK = re.compile(r"task (0|[1-9]\d{0,5})")


class _Settings(TypedDict, total=False):
    """The dataclasses of the options check all other settings."""

    method: str | None
    seed: int


class _Recipe(_Settings, total=False):
    """A recipe file. Settings may stand under ``settings`` or beside the models."""

    base: str | None
    tasks: Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
    merged: str | None
    out: str | None
    settings: _Settings | None


class _Input(TypedDict):
    name: str


class _Result(TypedDict):
    """The fields of a result's ``nufilt.json`` that say how to make it again."""

    inputs: dict[str, _Input]
    step: Count
    settings: NotRequired[_Settings]


def gather(words: Sequence[str], typed: Mapping[str, Any], settings: Collection[str]) -> dict[str, Any]:
    """Collect everything that the user says about a merge, by name.

    Args:
        words: at most one recipe file, and ``KEY=VALUE`` in Hydra's grammar.
        typed: options of the command line.
        settings: the names that are allowed beside ``base``, ``tasks``, ``merged`` and ``out``.

    Raises:
        ValueError: a name is unknown, a value is of the wrong type, or a file can't be read; the message names it.
    """
    files = [word for word in words if "=" not in word or Path(word).is_file()]
    if len(files) > 1:
        raise ValueError(f"one recipe file at a time, got {', '.join(files)}")
    gathered = read_recipe(Path(files[0])) if files else {}
    gathered.update(key_value(word) for word in words if word not in files)
    gathered.update(typed)
    checked(gathered, _Recipe)
    for name in gathered:
        if name not in (*MODELS, *settings):
            raise ValueError(unknown_option(str(name), [*MODELS, *settings]))
    if isinstance(gathered.get("tasks"), str):
        gathered["tasks"] = [gathered["tasks"]]
    if missing := [name for name in ("base", "tasks", "out") if not gathered.get(name)]:
        options = " and ".join(f"--{name.removesuffix('s')}" for name in missing)
        raise ValueError(f"{options} must be given, or said in a recipe file")
    return gathered


def read_recipe(file: Path) -> dict[str, Any]:
    """Read a YAML recipe, or the ``nufilt.json`` of a result, into one mapping of models and settings.

    Raises:
        ValueError: there is no such file, it can't be read, or a field is missing or of the wrong type; the message
            names the file and the field.
    """
    if not file.is_file():
        raise ValueError(f"there is no recipe file '{file}'; what is no file must be of the form KEY=VALUE")
    try:
        content = _load(file)
        if isinstance(content, dict) and "inputs" in content:
            result = checked(content, _Result)
            return {**_models_of(result, file.absolute().parent), **result.get("settings", {})}
        recipe = checked(content, _Recipe)
    except (YAMLError, OmegaConfBaseException, ValueError, OSError, RecursionError) as error:
        raise ValueError(f"the recipe '{file}' can't be read: {' '.join(str(error).split())}") from None
    settings = recipe.pop("settings", None) or {}
    return {**recipe, **settings}


def _load(file: Path) -> Any:
    if file.suffix == ".json":
        return parse_json(file.read_bytes(), object)
    return OmegaConf.to_container(OmegaConf.load(file), resolve=True)


def _models_of(result: _Result, folder: Path) -> dict[str, Any]:
    """Name the models and the first step of the merge that made a folder.

    A manifest holds no folders of the user, only names. A name is looked for where we are, then beside the folder.
    """

    def find(source: str) -> str:
        name = result["inputs"][source]["name"]
        beside = folder.parent / name
        return str(beside) if not Path(name).is_dir() and beside.is_dir() else name

    if "base" not in result["inputs"]:
        raise ValueError("field 'inputs.base': field required")
    numbers = sorted(int(source.removeprefix("task ")) for source in result["inputs"] if _TASK.fullmatch(source))
    models = {
        "base": find("base"),
        "tasks": [find(f"task {number}") for number in numbers],
        "step": result["step"] - len(numbers) + 1,
    }
    return {**models, "merged": find("merged")} if "merged" in result["inputs"] else models
