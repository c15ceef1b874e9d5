"""`nufilt mergekit`: mergekit with the methods of this package."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from fusion_bench_nufilt.methods.registry import METHODS
from fusion_bench_nufilt.utils.files import read_yaml, validate
from fusion_bench_nufilt.utils.options import unknown

from .terminal import Quiet, terminal

# Parameters that name layers: a list of names in a recipe of `nufilt merge`.
_PATTERNS = ("target_modules", "exclude_modules")


def mergekit(
    config: Annotated[
        Path,
        typer.Argument(help="File of mergekit, with a merge_method of mergekit or nufilt merge."),
    ],
    out: Annotated[Path, typer.Argument(help="Folder of the result.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(help="Options of mergekit-yaml, such as --cuda or --out-shard-size 1B."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Run mergekit with the methods of `nufilt merge`, such as merge_method: best.

    Their options are parameters of the file, with seed, target_modules and exclude_modules (regular
    expressions), other_params, and for each model a weight, the strength of its update. Models are
    merged in the order of the file.
    """
    with terminal(quiet):
        try:
            from mergekit.scripts.run_yaml import main

            from fusion_bench_nufilt.merge.in_mergekit import register_methods
        except ImportError as error:
            raise ValueError(f"{error}: pip install 'fusion-bench-nufilt[mergekit]'") from None
        register_methods()
        try:
            content = validate(read_yaml(config), dict[str, Any])
        except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
            raise ValueError(f"'{config}' can't be read: {' '.join(str(error).split())}") from None
        _check_parameters(content)
        words = [str(config), str(out), *(options or [])]
        if quiet:
            words.append("--quiet")
        try:
            main(words, prog_name="nufilt mergekit")
        except ValidationError as error:
            messages = [entry["msg"] for entry in error.errors()]
            raise ValueError("; ".join(messages)) from None


def _check_parameters(content: dict[str, Any]) -> None:
    """Refuse an unknown method, and for a method of this package a parameter that mergekit would
    ignore or read otherwise.
    """
    from mergekit.merge_methods import registered_methods

    methods = {method.spec.name: method.spec for method in registered_methods()}
    name = content.get("merge_method")
    if name not in methods:
        raise ValueError(unknown("merge_method", str(name), methods))
    if name not in METHODS:
        return
    names = [parameter.name for parameter in methods[name].parameters]
    for parameter, value in _parameters(content):
        if parameter not in names:
            raise ValueError(unknown(f"parameter of merge_method {name}", parameter, names))
        if parameter != "weight" and isinstance(value, list | dict):
            raise ValueError(
                f"{parameter}: mergekit reads a list as values from the first layer to the last, "
                f"and {name} takes one for the whole model: {_one_value(parameter, value)}"
            )


def _one_value(parameter: str, value: Any) -> str:
    """Return what to write for a parameter in place of a list."""
    is_list_of_names = isinstance(value, list) and all(isinstance(name, str) for name in value)
    if parameter in _PATTERNS and is_list_of_names:
        pattern = "|".join(map(re.escape, value))
        return f"write {parameter}: '(.*\\.)?({pattern})'"
    return f"give {parameter} one value"


def _parameters(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters that are set anywhere in a file of mergekit, and their values."""
    parts: Iterable[Any] = ()
    if isinstance(content, dict):
        if isinstance(content.get("parameters"), dict):
            yield from content["parameters"].items()
        parts = content.values()
    elif isinstance(content, list):
        parts = content
    for part in parts:
        yield from _parameters(part)
