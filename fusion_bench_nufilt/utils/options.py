"""Options, each defined once, as a field of a frozen dataclass that carries its own help.

Signatures of algorithms, options of the command line and tables in the documentation are read from
these fields.
"""

import dataclasses
import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, field
from inspect import Parameter, Signature
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

_Class = TypeVar("_Class", bound=type)
_Options = TypeVar("_Options")

Scope = Literal["stream", "merge", "tasks", "run"]
"""What an option belongs to. stream: a whole stream, whose merges should all have the same value.
merge: one merge, whose value the next one takes over. tasks: the tasks of one merge. run: how and
where a run goes, which its result does not record."""


def option(
    default: Any, help: str, *, symbol: str = "", panel: str = "Method", scope: Scope = "stream"
) -> Any:
    """Return a dataclass field with its documentation: its help, its symbol in the paper, and the
    heading above it.
    """
    return field(
        default=default, metadata={"help": help, "symbol": symbol, "panel": panel, "scope": scope}
    )


Door = Literal["fusion_bench", "nufilt compare", "nufilt merge", "Python"]
"""Where a user gives options."""


def typed(door: Door, options: Mapping[str, object], method: str = "NAME") -> str:
    """Return options in the form in which they are typed at a door."""
    if door == "fusion_bench":
        return " ".join(f"method.{name}={value}" for name, value in options.items())
    if door == "nufilt compare":
        return method + "".join(f":{name}={value}" for name, value in options.items())
    if door == "nufilt merge":
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def with_scope(kinds: Iterable[type], *scopes: Scope) -> list[str]:
    """Return the names of those options of dataclasses that have one of the scopes."""
    return [
        each.name
        for kind in kinds
        for each in dataclasses.fields(kind)
        if each.metadata["scope"] in scopes
    ]


def takes_options(*kinds: type) -> Callable[[_Class], _Class]:
    """Return a decorator that puts the fields of dataclasses into the signature of a constructor
    with ``**kwargs``.

    Everything that reads signatures (FusionBench's ``auto_register_config``, an editor) then sees
    every option by name.
    """
    options = [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for kind in kinds
        for each in dataclasses.fields(kind)
    ]

    def decorate(cls: _Class) -> _Class:
        constructor: Any = vars(cls)["__init__"]
        *named, kwargs = inspect.signature(constructor).parameters.values()
        constructor.__signature__ = Signature([*named, *options, kwargs])
        return cls

    return decorate


def split_options(
    kinds: Sequence[type], options: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return an instance of each dataclass, made from the options that are its fields, and all
    other options.
    """
    left, made = dict(options), []
    for kind in kinds:
        made.append(
            kind(**{f.name: left.pop(f.name) for f in dataclasses.fields(kind) if f.name in left})
        )
    return made, left


def options_of(kind: type[_Options], algorithm: object) -> _Options:
    """Return the options of a kind that an algorithm now has as attributes; raise a ValueError if
    one is invalid.
    """
    return kind(**{each.name: getattr(algorithm, each.name) for each in dataclasses.fields(kind)})  # type: ignore[arg-type]


def unknown(what: str, name: str, known: Iterable[str], known_are: str = "") -> str:
    """Return the message about an unknown name, with the one that was meant, or else ``known_are``:
    by default, all.
    """
    known = sorted(set(known))
    close = difflib.get_close_matches(str(name), known, n=1)
    rest = f"did you mean '{close[0]}'?" if close else known_are or f"there are {', '.join(known)}"
    return f"there is no {what} '{name}'; {rest}"


def choices(option: Field[Any]) -> tuple[Any, ...]:
    """Return the values that a type such as ``Literal["adam", "closed_form"]`` allows; () for any
    other type.
    """
    kinds = (
        get_args(option.type) if get_origin(option.type) in (Union, UnionType) else (option.type,)
    )
    if not all(kind is bool or get_origin(kind) is Literal for kind in kinds):
        return ()
    return tuple(
        value for kind in kinds for value in ((True, False) if kind is bool else get_args(kind))
    )


def check_choices(options: Any) -> None:
    """Raise a ValueError that names an option if its value is none of its choices, or should be a
    string and is not.
    """
    for each in dataclasses.fields(options):
        value, allowed, kinds = (
            getattr(options, each.name),
            choices(each),
            get_args(each.type) or (each.type,),
        )
        if str in kinds and {str, NoneType} >= {*kinds} and not isinstance(value, kinds):
            raise ValueError(f"{each.name} must be a word, got {value!r}")
        if allowed and not any(
            value is choice or (value == choice and type(value) is str) for choice in allowed
        ):
            words = ", ".join(
                str(choice).lower() if choice in (True, False) else repr(choice)
                for choice in allowed
            )
            raise ValueError(f"{each.name} must be one of {words}, got {value!r}")


def check_whole(
    options: Any, *names: str, least: int = 0, most: int = 2**31, otherwise: str = ""
) -> None:
    """Raise a ValueError if an option is not a whole number in the range; ``otherwise`` says what
    else is allowed.
    """
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            bound = f" and <= {most}" if isinstance(value, int) and value > most else ""
            what = f">= {least}{bound}{otherwise and f', {otherwise}'}"
            raise ValueError(f"{name} must be a whole number {what}, got {value!r}")


def check_positive(options: Any, *names: str) -> None:
    """Raise a ValueError if an option is not a finite number above zero."""
    for name in names:
        value = getattr(options, name)
        if not (is_number(value) and value > 0):
            raise ValueError(f"{name} must be a number > 0, got {value!r}")


def check_seed(seed: object) -> None:
    """Raise a ValueError if a seed is not a whole number; it may be negative."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"seed must be a whole number, got {seed!r}")


def is_number(value: object) -> bool:
    """Tell whether a value is a finite number; True and False are not."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max  # an int may exceed it
