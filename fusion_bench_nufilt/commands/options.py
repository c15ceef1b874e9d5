"""Options of the command line that are derived from the fields of dataclasses."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Annotated, Any, Literal, TypeVar, get_args

import typer

from fusion_bench_nufilt.core.options import choices, split_options

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
    """Type and default of an option as it is typed on the command line."""
    if values := choices(option):
        words = tuple(str(value).lower() if isinstance(value, bool) else value for value in values)
        return Literal[words], words[values.index(option.default)]
    if option.name == "max_memory":
        return str | None, None
    if Sequence[str] in get_args(option.type):
        return list[str] | None, None
    return option.type, option.default


def from_command_line(kinds: Sequence[type], typed: Mapping[str, Any]) -> list[Any]:
    """One object of each dataclass from what was typed.

    Raises:
        ValueError: a value out of its range; names the option.
    """
    options = dict(typed)
    for key in ("target_modules", "exclude_modules"):
        options[key] = patterns(options[key])
    options["target_modules"] = options["target_modules"] or "auto"
    options["null_space"] = {"true": True, "false": False}.get(options["null_space"], options["null_space"])
    options["max_memory"] = _bytes(options["max_memory"])
    return split_options(kinds, options)[0]


def patterns(words: list[str] | None) -> str | list[str] | None:
    """One word that is special or a regular expression by itself; plain words are a list, as in the YAML."""
    if not words:
        return None
    if len(words) == 1 and (words[0] in ("auto", "all-linear") or re.search(r"[\\*+?()\[\]|^$]", words[0])):
        return words[0]
    return words


def _bytes(size: str | None) -> int | None:
    """``4GB``, ``500MB``, ``4GiB`` or a plain number of bytes."""
    if size is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", size.strip().lower())
    if not match:
        raise ValueError(f"max_memory must be a size such as 4GB, got '{size}'")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " "))
