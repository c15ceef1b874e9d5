"""What all commands have in common: options made from the fields of dataclasses, a log and one-line
errors.
"""

import dataclasses
import inspect
import logging
import os
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import Parameter
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, TypeVar, get_args

import typer
from rich.console import Console
from tqdm.auto import tqdm

from fusion_bench_nufilt.nufilt.options import FusionConfig
from fusion_bench_nufilt.utils.files import escape_markup
from fusion_bench_nufilt.utils.logs import TerminalLog, quiet_requests
from fusion_bench_nufilt.utils.options import choices
from fusion_bench_nufilt.utils.overrides import key_value

# The options that are a number or a share of the width.
RANKS = {field.name for field in dataclasses.fields(FusionConfig) if field.type == int | float}
# The options that are a number of bytes, or a size such as 4GB.
SIZES = ("max_memory",)
ConfigDir = Annotated[
    Path | None,
    typer.Option(help="Folder of your own configurations, such as modelpool/mine.yaml."),
]
_Command = TypeVar("_Command", bound=Callable[..., None])


def options_from(
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


Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Only results and errors, no progress, log or warnings."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")]


@contextmanager
def terminal(quiet: bool = False) -> Iterator[Console]:
    """Open a console for the log and for progress; an error ends the command with one line and exit
    code 1.
    """
    # The file is named, since a comparison silences sys.stderr later.
    console = Console(file=sys.stderr, quiet=quiet, highlight=False, soft_wrap=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[TerminalLog(console)])
    quiet_requests()
    try:
        yield console
    except (ValueError, OSError) as error:  # a hub out of reach is an OSError
        # Errors are told in spite of --quiet.
        console.quiet = False
        console.print(f"[red]error:[/red] {escape_markup(_message(error))}")
        raise typer.Exit(1) from None


def _message(error: ValueError | OSError) -> str:
    """Return what an error says; of one of a file, without Python's number for it."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"'{error.filename}': {error.strerror}"
    return str(error)


def warn(console: Console, warnings: Iterable[str]) -> None:
    for warning in warnings:
        console.print(f"[yellow]warning:[/yellow] {escape_markup(warning)}")


def name_files(console: Console, folder: Path, files: Iterable[str]) -> None:
    console.print(f"[bold]{escape_markup(str(folder))}[/bold]: {', '.join(files)}")


def raise_failures(failures: Sequence[str]) -> None:
    """End the command with exit code 1 and a line for each method that failed, where the rest of
    the work has been done and saved.
    """
    if failures:
        lines = ["these failed, and all else is finished:", *failures]
        raise ValueError("\n".join(lines))


def only_log_of(package: str) -> None:
    """Log warnings alone of all but one package of this project."""
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger(f"fusion_bench_nufilt.{package}").setLevel(logging.INFO)


def bars_on(console: Console) -> "partial[tqdm[Any]]":
    """Return tqdm for the progress bars of a command, which are shown on a terminal only."""
    # With None, tqdm looks for itself whether the file is a terminal.
    return partial(tqdm, file=console.file, disable=console.quiet or None)


@contextmanager
def interruptible(console: Console, kept: str) -> Iterator[None]:
    """Stop after the work at hand on Ctrl-C or SIGTERM, at once on a second one; say where finished
    work is kept.
    """
    arrived: list[int] = []  # the signals, in their order

    def say(event: str) -> None:
        advice = f"finished work is kept in {escape_markup(kept)}; the same command goes on"
        with tqdm.external_write_mode(console.file):
            console.print(f"{event}: {advice}")

    def stop(number: int, frame: FrameType | None) -> None:
        # The other signal keeps its handler: it may have arrived already.
        signal.signal(number, signal.SIG_DFL)
        if arrived:
            os.kill(os.getpid(), number)
        arrived.append(number)
        say("stopping when the work at hand is done (once more: at once)")
        raise KeyboardInterrupt

    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.signal(number, stop)
    try:
        yield
    except KeyboardInterrupt:
        if not arrived:
            say("interrupted")
        last_signal = arrived[-1] if arrived else signal.SIGINT
        # The code by which shells report a process that a signal has ended.
        raise typer.Exit(128 + last_signal) from None
    finally:
        # Whoever calls a command from Python has handlers of their own.
        for number, handler in handlers.items():
            signal.signal(number, handler)
