"""Command-line options, made from the fields of dataclasses."""

import dataclasses
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import Parameter
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import typer

from fusion_bench_nufilt.compare.overrides import key_value
from fusion_bench_nufilt.nufilt.config import FusionConfig
from fusion_bench_nufilt.utils.options import choices

# The options that are a number or a share of the width.
RANKS = {each.name for each in dataclasses.fields(FusionConfig) if each.type == int | float}
# The options that are a number of bytes, or a size such as 4GB.
SIZES = ("max_memory", "max_shard_size")
ConfigDir = Annotated[
    Path | None,
    typer.Option(help="Folder of your own configurations, such as modelpool/mine.yaml."),
]
_Command = TypeVar("_Command", bound=Callable[..., None])


def takes_options(
    *kinds: type, varied: Collection[str] = (), common: Collection[str] = ()
) -> Callable[[_Command], _Command]:
    """Return a decorator that puts the fields of dataclasses into the options of a command with
    ``**options``.

    Args:
        kinds: the dataclasses.
        varied: those of their fields whose defaults a method may change.
        common: those that stand first in the help, under no heading.
    """
    fields = defaultdict(list)
    for each in chain(*map(dataclasses.fields, kinds)):
        fields[each.name].append(each)

    def decorate(command: _Command) -> _Command:
        parameters = list(inspect.signature(command).parameters.values())[:-1]
        for name, (each, *others) in fields.items():
            kind, default = _as_typed(each)
            depends = name in varied or any(other.default != each.default for other in others)
            shown = "depends on the method" if depends else True
            info = typer.Option(
                help=each.metadata["help"],
                rich_help_panel=None if name in common else each.metadata.get("panel", "Method"),
                show_default=shown,
            )
            annotation: Any = Annotated[kind, info]
            parameters.append(
                Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _as_typed(option: dataclasses.Field[Any]) -> tuple[Any, Any]:
    if option.type is bool:  # --name and --no-name
        return bool, option.default
    if values := choices(option):
        words = tuple(str(value).lower() if isinstance(value, bool) else value for value in values)
        return Literal[words], words[values.index(option.default)]
    if option.name in SIZES:
        return str | None, None
    if Sequence[str] in get_args(option.type):
        return list[str] | None, None
    if Sequence[float] in get_args(option.type):
        return list[float] | None, None
    if option.type == int | float:
        return str, str(option.default)
    return option.type, option.default


def typed_values(context: typer.Context, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the user typed, with values as in YAML."""
    values = {key: value for key, value in options.items() if was_typed(context, key)}
    for key in {"target_modules", "exclude_modules"} & values.keys():
        values[key] = patterns(values[key])
    for key in {"null_space", *RANKS} & values.keys():
        _, values[key] = key_value(f"{key}={values[key]}")
    return values


def was_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def patterns(words: list[str] | None) -> str | list[str] | None:
    """Return words as in YAML: a special one or a regular expression by itself, plain ones as a
    list.
    """
    if (
        words
        and len(words) == 1
        and (words[0] in ("auto", "all-linear") or re.search(r"[\\*+?()\[\]|^$]", words[0]))
    ):
        return words[0]
    return words or None
