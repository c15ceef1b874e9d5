"""What all commands share on the terminal: a log, and errors of one line."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from fusion_bench_nufilt.files import printable


def shown(text: str) -> str:
    """A text that may hold names from elsewhere, for a console: what would be markup or control it is escaped."""
    return escape(_printable_lines(text))


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


class _Message(logging.Formatter):
    """The message by itself, and nothing in it that would control the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return _printable_lines(record.getMessage())


@contextmanager
def terminal() -> Iterator[Console]:
    """A console for the log and for progress; what is wrong ends the command with one line and exit code 1.

    The console holds on to the stderr of now: while methods are compared, what they print there is silenced.
    """
    console = Console(file=sys.stderr)
    handler = RichHandler(console=console, show_path=False, show_time=False)
    handler.setFormatter(_Message())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        yield console
    except (ValueError, OSError) as error:  # a hub out of reach is an OSError
        console.print(f"[red]error:[/red] {shown(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
