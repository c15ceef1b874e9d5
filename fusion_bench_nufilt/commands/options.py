"""Options of the command line that are derived from the fields of dataclasses."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Annotated, Any, Literal, TypeVar, get_args

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from fusion_bench_nufilt.core import FusionConfig
from fusion_bench_nufilt.core.options import choices

RANKS = {each.name for each in dataclasses.fields(FusionConfig) if each.type == int | float}  # numbers or shares
_Command = TypeVar("_Command", bound=Callable[..., None])


def takes_options(*kinds: type) -> Callable[[_Command], _Command]:
    """Give a command, which takes ``**options``, the fields of dataclasses for its options."""

    def decorate(command: _Command) -> _Command:
        parameters = list(inspect.signature(command).parameters.values())[:-1]
        for each in (each for kind in kinds for each in dataclasses.fields(kind)):
            kind, default = _as_typed(each)
            info = typer.Option(help=each.metadata["help"], rich_help_panel=each.metadata["panel"])
            parameters.append(
                Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])
            )
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _as_typed(option: dataclasses.Field[Any]) -> tuple[Any, Any]:
    """Type and default of an option on the command line."""
    if values := choices(option):
        words = tuple(str(value).lower() if isinstance(value, bool) else value for value in values)
        return Literal[words], words[values.index(option.default)]
    if option.name == "max_memory":
        return str | None, None
    if Sequence[str] in get_args(option.type):
        return list[str] | None, None
    if option.type == int | float:
        return str, str(option.default)
    return option.type, option.default


def typed_values(context: typer.Context, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those options that were typed and not left at their defaults, as they would stand in YAML."""
    values = {key: value for key, value in options.items() if was_typed(context, key)}
    for key in ("target_modules", "exclude_modules"):
        if key in values:
            values[key] = patterns(values[key])
    if (word := values.get("null_space")) in ("true", "false"):
        values["null_space"] = word == "true"
    for key in RANKS & values.keys():
        values[key] = _number(key, values[key])
    return values


def was_typed(context: typer.Context, name: str) -> bool:
    """Whether an option was typed, and not left at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def patterns(words: list[str] | None) -> str | list[str] | None:
    """One word that is special or a regular expression by itself; plain words are a list, as in the YAML."""
    if not words:
        return None
    if len(words) == 1 and (words[0] in ("auto", "all-linear") or re.search(r"[\\*+?()\[\]|^$]", words[0])):
        return words[0]
    return words


def _number(name: str, text: str) -> int | float:
    try:
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got '{text}'") from None


def as_bytes(size: object) -> int:
    """``4GB``, ``500MB``, ``4GiB`` or a plain number of bytes."""
    try:
        return TypeAdapter(ByteSize).validate_python(size)
    except ValidationError:
        raise ValueError(f"max_memory must be a size such as 4GB, got '{size}'") from None
