"""What to merge and how, from a recipe file, from KEY=VALUE words and from typed options; later sources win."""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BeforeValidator
from typing_extensions import TypedDict
from yaml import YAMLError

from fusion_bench_nufilt.compare.overrides import key_value
from fusion_bench_nufilt.core.options import unknown_option
from fusion_bench_nufilt.storage.json_files import checked, parse_json
from fusion_bench_nufilt.storage.manifest import Manifest

MODELS = ("base", "tasks", "merged", "out")
_TASK = re.compile(r"task (0|[1-9]\d{0,5})")


class _Recipe(TypedDict, total=False):
    """A recipe file. Settings may stand under ``settings`` or beside the models; their dataclasses check them."""

    base: str | None
    tasks: Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
    merged: str | None
    out: str | None
    method: str | None
    settings: dict[Any, Any] | None


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
        if file.suffix == ".json":
            content: Any = parse_json(file.read_bytes(), object)
        else:
            content = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
        if isinstance(content, dict) and "inputs" in content:
            content = _recipe_of(checked(content, Manifest), file.absolute().parent)
        settings = checked(content, _Recipe).pop("settings", None) or {}
        return dict(checked({**content, **settings}, _Recipe))
    except (YAMLError, OmegaConfBaseException, ValueError, OSError, RecursionError) as error:
        raise ValueError(f"the recipe '{file}' can't be read: {' '.join(str(error).split())}") from None


def _recipe_of(manifest: Manifest, folder: Path) -> dict[str, Any]:
    """Return the recipe of the merge that made a folder.

    A manifest holds no folders of the user, only names. A name is looked for where we are, then beside the folder.
    """
    inputs = manifest["inputs"]
    known = {f"inputs.{source}.name": "name" in model for source, model in inputs.items()}
    known |= {"inputs.base": "base" in inputs, "step": "step" in manifest}
    if missing := [field for field, there in known.items() if not there]:
        raise ValueError(f"field '{missing[0]}': field required")

    def find(source: str) -> str:
        name = inputs[source]["name"]
        beside = folder.parent / name
        return str(beside) if not Path(name).is_dir() and beside.is_dir() else name

    numbers = sorted(int(source.removeprefix("task ")) for source in inputs if _TASK.fullmatch(source))
    return {
        "base": find("base"),
        "tasks": [find(f"task {number}") for number in numbers],
        **({"merged": find("merged")} if "merged" in inputs else {}),
        "step": manifest["step"] - len(numbers) + 1,
        "settings": manifest.get("settings"),
    }
