"""What to merge and how, from a recipe file, from KEY=VALUE words and from options; the later win."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fusion_bench_nufilt.compare.overrides import key_value
from fusion_bench_nufilt.core.options import unknown_option

MODELS = ("base", "tasks", "merged", "out")


def gather(words: Sequence[str], typed: Mapping[str, Any], settings: Collection[str]) -> dict[str, Any]:
    """All that is known of a merge, by name.

    Args:
        words: at most one recipe file, and ``KEY=VALUE`` in Hydra's grammar.
        typed: options of the command line.
        settings: the names there are beside ``base``, ``tasks``, ``merged`` and ``out``.

    Raises:
        ValueError: a name that there is not, or something that can't be read; names it.
    """
    files = [word for word in words if "=" not in word or Path(word).is_file()]
    if len(files) > 1:
        raise ValueError(f"one recipe file at a time, got {', '.join(files)}")
    gathered = read_recipe(Path(files[0])) if files else {}
    gathered.update(key_value(word) for word in words if word not in files)
    gathered.update(typed)
    for name in gathered:
        if name not in (*MODELS, *settings):
            raise ValueError(unknown_option(name, [*MODELS, *settings]))
    if isinstance(gathered.get("tasks"), str):
        gathered["tasks"] = [gathered["tasks"]]
    if missing := [name for name in ("base", "tasks", "out") if not gathered.get(name)]:
        options = " and ".join(f"--{name.removesuffix('s')}" for name in missing)
        raise ValueError(f"{options} must be given, or said in a recipe file")
    return gathered


def read_recipe(file: Path) -> dict[str, Any]:
    """The names of a YAML recipe, those under ``settings`` among them; the ``nufilt.json`` of a result is one too.

    Raises:
        ValueError: it is no file, or no mapping.
    """
    if not file.is_file():
        raise ValueError(f"there is no recipe file '{file}'; what is no file must be of the form KEY=VALUE")
    try:
        content: Any = (
            json.loads(file.read_text(encoding="utf-8"))
            if file.suffix == ".json"
            else OmegaConf.to_container(OmegaConf.load(file), resolve=True)
        )
    except (YAMLError, OmegaConfBaseException, ValueError, OSError) as error:
        raise ValueError(f"the recipe '{file}' can't be read: {' '.join(str(error).split())}") from None
    settings = content.pop("settings", None) or {} if isinstance(content, dict) else None
    if not isinstance(settings, dict):
        raise ValueError(f"the recipe '{file}' must name base, tasks, out and settings")
    if "inputs" in content:
        content = _from_manifest(content, file.absolute().parent)
    return content | settings


def _from_manifest(content: Mapping[str, Any], result: Path) -> dict[str, Any]:
    """Models and first step of the merge that made ``result``.

    A manifest has no folders of the user, only names: a name is looked for where we are, then beside the result.
    """
    names = {source: entry["name"] for source, entry in content["inputs"].items()}
    found = {
        source: name if Path(name).is_dir() or not (beside := result.parent / name).is_dir() else str(beside)
        for source, name in names.items()
    }
    tasks = [name for source, name in found.items() if source.startswith("task ")]
    models = {"base": found["base"], "tasks": tasks, "step": content["step"] - len(tasks) + 1}
    return models | ({"merged": found["merged"]} if "merged" in found else {})
