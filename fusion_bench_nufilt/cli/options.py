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

from fusion_bench_nufilt.nufilt.config import FusionConfig
from fusion_bench_nufilt.utils.options import choices
from fusion_bench_nufilt.utils.overrides import key_value

# The options that are a number or a share of the width.
RANKS = {field.name for field in dataclasses.fields(FusionConfig) if field.type == int | float}
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
    # Two methods may have an option of one name, which the command has once.
    fields_by_name = defaultdict(list)
    for field in chain.from_iterable(map(dataclasses.fields, kinds)):
        fields_by_name[field.name].append(field)

    def decorate(command: _Command) -> _Command:
        *parameters, _ = inspect.signature(command).parameters.values()  # but **options
        for name, fields in fields_by_name.items():
            field = fields[0]
            kind, default = _as_typed(field)
            show_default: bool | str = True
            if name in varied or any(other.default != field.default for other in fields):
                show_default = "depends on the method"
            info = typer.Option(
                help=field.metadata["help"],
                rich_help_panel=None if name in common else field.metadata.get("panel", "Method"),
                show_default=show_default,
            )
            annotation: Any = Annotated[kind, info]
            parameters.append(
                Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )
        # typer makes options of a signature alone, and does not know **options.
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _as_typed(option: dataclasses.Field[Any]) -> tuple[Any, Any]:
    """Return the type and the default of an option on the command line."""
    if option.type is bool:  # --name and --no-name
        return bool, option.default
    values = choices(option)
    if values:
        words = []
        for value in values:
            # As YAML writes them, since recipes have the same words.
            words.append(str(value).lower() if isinstance(value, bool) else value)
        return Literal[tuple(words)], words[values.index(option.default)]
    if option.name in SIZES:
        return str | None, None
    if Sequence[str] in get_args(option.type):
        return list[str] | None, None
    if Sequence[float] in get_args(option.type):
        return list[float] | None, None
    # typer takes no union of types; the word is read as YAML by typed_values.
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
    """Tell whether the user gave a parameter on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def patterns(words: list[str] | None) -> str | list[str] | None:
    """Return words as in YAML: a special one or a regular expression by itself, plain ones as a
    list.
    """
    if not words:
        return None
    if len(words) > 1:
        return words
    word = words[0]
    is_special = word in ("auto", "all-linear")
    is_expression = re.search(r"[\\*+?()\[\]|^$]", word) is not None
    if is_special or is_expression:
        return word
    return words
