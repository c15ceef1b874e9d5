"""What all commands share on the terminal: a log, and errors of one line."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape


@contextmanager
def terminal() -> Iterator[Console]:
    """A console for the log and for progress; what is wrong ends the command with one line and exit code 1.

    The console holds on to the stderr of now: while methods are compared, what they print there is silenced.
    """
    console = Console(file=sys.stderr)
    handler = RichHandler(console=console, show_path=False, show_time=False)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    try:
        yield console
    except (ValueError, OSError) as error:  # a hub out of reach is an OSError
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
