"""Options, each said once: a field of a frozen dataclass that carries its own help.

The signature of the algorithm, the options of the command line and the table in the documentation are all read from
these fields.
"""

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, field
from inspect import Parameter, Signature
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

_Class = TypeVar("_Class", bound=type)


def option(default: Any, help: str, *, symbol: str = "", panel: str = "Method") -> Any:
    """A dataclass field with what people are told about it.

    Args:
        default: its default value.
        help: what it does, in one or two sentences.
        symbol: its symbol in the paper.
        panel: the heading that it stands under in ``--help`` and in the documentation.
    """
    return field(default=default, metadata={"help": help, "symbol": symbol, "panel": panel})


def takes_options(*kinds: type) -> Callable[[_Class], _Class]:
    """Give the constructor of a class, which takes ``**kwargs``, the fields of dataclasses for a signature.

    What reads signatures (FusionBench's ``auto_register_config``, an editor's help) then sees every option by name.
    """
    options = [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for kind in kinds
        for each in dataclasses.fields(kind)
    ]

    def decorate(cls: _Class) -> _Class:
        constructor: Any = vars(cls)["__init__"]
        before = inspect.signature(constructor).parameters.values()
        named = [p for p in before if p.kind is not Parameter.VAR_KEYWORD]
        others = [p for p in before if p.kind is Parameter.VAR_KEYWORD]
        constructor.__signature__ = Signature([*named, *options, *others])
        return cls

    return decorate


def split_options(kinds: Sequence[type], options: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Make one object of each dataclass from the options that are its fields; the other options are returned, too."""
    left, made = dict(options), []
    for kind in kinds:
        made.append(kind(**{f.name: left.pop(f.name) for f in dataclasses.fields(kind) if f.name in left}))
    return made, left


def unknown_option(name: str, known: Iterable[str]) -> str:
    """What to say of an option that there is not, with the one that was probably meant."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"there is no option '{name}'" + (f"; did you mean '{close[0]}'?" if close else f"; there are {known}")


def choices(option: Field[Any]) -> tuple[Any, ...]:
    """The values that an option is limited to by its type, as ``Literal["adam", "closed_form"]``; () if it is not."""
    kinds = get_args(option.type) if get_origin(option.type) in (Union, UnionType) else (option.type,)
    if not all(kind is bool or get_origin(kind) is Literal for kind in kinds):
        return ()
    return tuple(value for kind in kinds for value in ((True, False) if kind is bool else get_args(kind)))


def check_choices(options: Any) -> None:
    """Refuse a value that is none of the choices of its option.

    Raises:
        ValueError: names the option and its choices.
    """
    for each in dataclasses.fields(options):
        value, allowed = getattr(options, each.name), choices(each)
        if allowed and not any(value is choice or (value == choice and type(value) is str) for choice in allowed):
            words = ", ".join(str(choice).lower() if choice in (True, False) else repr(choice) for choice in allowed)
            raise ValueError(f"{each.name} must be one of {words}, got {value!r}")


def check_whole(options: Any, *names: str, least: int = 0, most: int = 2**31, otherwise: str = "") -> None:
    """Refuse what is not a whole number from ``least`` to ``most``; ``otherwise`` says what else would do.

    Raises:
        ValueError: names the option.
    """
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            bound = f" and <= {most}" if isinstance(value, int) and value > most else ""
            what = f">= {least}{bound}{otherwise and f', {otherwise}'}"
            raise ValueError(f"{name} must be a whole number {what}, got {value!r}")


def is_number(value: object) -> bool:
    """Whether a value is a finite number; truth values are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
