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
from itertools import chain
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

_Class = TypeVar("_Class", bound=type)
_Options = TypeVar("_Options")

Scope = Literal["stream", "merge", "tasks", "run"]
"""What an option belongs to. stream: a whole stream, whose merges should all have the same value.
merge: one merge, whose value the next one takes over. tasks: the tasks of one merge. run: how and
where a run goes, which its result does not record."""


def option(
    default: Any,
    help: str,
    *,
    symbol: str = "",
    panel: str = "Method",
    scope: Scope = "stream",
) -> Any:
    """Return a dataclass field with its documentation: its help, its symbol in the paper, and the
    heading above it.
    """
    metadata = {
        "help": help,
        "symbol": symbol,
        "panel": panel,
        "scope": scope,
    }
    documented: Field[Any] = field(default=default, metadata=metadata)
    return documented


def with_scope(kinds: Iterable[type], *scopes: Scope) -> list[str]:
    """Return the names of those options of dataclasses that have one of the scopes."""
    fields = chain.from_iterable(map(dataclasses.fields, kinds))
    return [field.name for field in fields if field.metadata.get("scope", "stream") in scopes]


def recorded_options(*instances: Any) -> dict[str, Any]:
    """Return the options of some dataclasses that results record, by name: not those of a run."""
    values = {}
    for instance in instances:
        for option in dataclasses.fields(instance):
            if option.metadata.get("scope") != "run":
                values[option.name] = getattr(instance, option.name)
    return values


def takes_options(*kinds: type) -> Callable[[_Class], _Class]:
    """Return a decorator that puts the fields of dataclasses into the signature of a constructor
    with ``**kwargs``, and keeps the dataclasses as ``option_kinds``.

    Everything that reads signatures (FusionBench's ``auto_register_config``, an editor) then sees
    every option by name.
    """
    options = []
    for option in chain.from_iterable(map(dataclasses.fields, kinds)):
        parameter = Parameter(
            option.name, Parameter.KEYWORD_ONLY, default=option.default, annotation=option.type
        )
        options.append(parameter)

    def decorate(cls: _Class) -> _Class:
        constructor: Any = vars(cls)["__init__"]
        *parameters, kwargs = inspect.signature(constructor).parameters.values()
        constructor.__signature__ = Signature([*parameters, *options, kwargs])
        cls.option_kinds = kinds  # type: ignore[attr-defined]
        return cls

    return decorate


def split_options(
    kinds: Sequence[type], options: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return an instance of each dataclass, made from the options that are its fields, and all
    other options.
    """
    other_options = dict(options)
    instances = []
    for kind in kinds:
        values = {}
        for option in dataclasses.fields(kind):
            if option.name in other_options:
                values[option.name] = other_options.pop(option.name)
        instances.append(kind(**values))
    return instances, other_options


def options_of(kind: type[_Options], algorithm: object) -> _Options:
    """Return the options of a kind that an algorithm now has as attributes; raise a ValueError if
    one is invalid.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    return kind(**{field.name: getattr(algorithm, field.name) for field in fields})


def unknown(kind: str, name: str, names: Iterable[str], listing: str = "") -> str:
    """Return the message about a name that there is not, of the kind "method" or so.

    It suggests the most similar one of the ``names`` that there are. If none is similar, it says
    ``listing``, by default all names.
    """
    return f"there is no {kind} '{name}'; {advice(name, names, listing)}"


def advice(name: str, names: Iterable[str], listing: str = "") -> str:
    """Return the end of :func:`unknown`."""
    names = sorted(set(names))
    similar_names = difflib.get_close_matches(str(name), names, n=1)
    if similar_names:
        return f"did you mean '{similar_names[0]}'?"
    return listing or f"there are {', '.join(names)}"


def _alternatives(option: Field[Any]) -> tuple[Any, ...]:
    """Return the types of a union such as ``str | None``, or the type itself."""
    if get_origin(option.type) in (Union, UnionType):
        return get_args(option.type)
    return (option.type,)


def choices(option: Field[Any]) -> tuple[Any, ...]:
    """Return the values that a type such as ``Literal["adam", "closed_form"]`` allows; () for any
    other type.
    """
    values: list[Any] = []
    for kind in _alternatives(option):
        if kind is bool:
            values += [True, False]
        elif get_origin(kind) is Literal:
            values += get_args(kind)
        else:
            return ()
    return tuple(values)


def check_choices(options: Any) -> None:
    """Raise a ValueError that names an option if its value is none of its choices, or should be a
    string and is not.
    """
    for option in dataclasses.fields(options):
        value = getattr(options, option.name)
        kinds = _alternatives(option)
        if set(kinds) in ({str}, {str, NoneType}) and not isinstance(value, kinds):
            raise ValueError(f"{option.name} must be a word, got {value!r}")
        allowed = choices(option)
        if allowed and not _is_one_of(value, allowed):
            words = ", ".join(map(_in_yaml, allowed))
            raise ValueError(f"{option.name} must be one of {words}, got {value!r}")


def _is_one_of(value: Any, choices: Iterable[Any]) -> bool:
    """Tell whether a value is one of the choices; 1 is not True, although it equals it."""
    return any(type(value) is type(choice) and value == choice for choice in choices)


def _in_yaml(choice: Any) -> str:
    if isinstance(choice, bool):
        return str(choice).lower()
    return repr(choice)


def check_whole(options: Any, *names: str, most: int = 2**31) -> None:
    """Raise a ValueError if an option is not a whole number above zero."""
    for name in names:
        value = getattr(options, name)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if is_whole and 1 <= value <= most:
            continue
        limits = ">= 1"
        # The upper bound is named only where it is exceeded: it is far beyond what makes sense.
        if is_whole and value > most:
            limits += f" and <= {most}"
        raise ValueError(f"{name} must be a whole number {limits}, got {value!r}")


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
    return abs(value) <= sys.float_info.max  # neither NaN nor infinite; an int may exceed it, too
