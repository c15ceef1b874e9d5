"""The terminal output of all commands: a log, and one-line errors."""

import logging
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from tqdm.auto import tqdm

from fusion_bench_nufilt.utils.files import escape_markup, printable


class _Log(RichHandler):
    """Prints the log above the progress bars."""

    def format(self, record: logging.LogRecord) -> str:
        lines = record.getMessage().split("\n")
        return "\n".join(map(printable, lines))

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(self.console.file):
            super().emit(record)


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
    logging.basicConfig(
        level=logging.INFO, handlers=[_Log(console=console, show_path=False, show_time=False)]
    )
    try:
        yield console
    except (ValueError, OSError) as error:  # a hub out of reach is an OSError
        # Errors are told in spite of --quiet.
        console.quiet = False
        console.print(f"[red]error:[/red] {escape_markup(str(error))}")
        raise typer.Exit(1) from None


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
