"""What all commands share on the terminal: a log, and errors of one line."""

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from fusion_bench_nufilt.storage.files import printable


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


@contextmanager
def interruptible(console: Console, kept: str) -> Iterator[None]:
    """On Ctrl-C or SIGTERM, say at once what is kept, and end when the work at hand is done; the second time, end.

    Args:
        console: to say it on.
        kept: where what is finished is kept.
    """
    numbers = [int(signal.SIGINT)]  # the last one is that of the signal

    def stop(number: int, frame: FrameType | None) -> None:
        restore()
        signal.signal(number, signal.SIG_DFL)
        numbers.append(number)
        say("stopping when what is being worked on is done (once more: at once)")
        raise KeyboardInterrupt

    def say(what: str) -> None:
        console.print(f"{what}: what is finished is kept in {shown(kept)}; the same command goes on", highlight=False)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        if len(numbers) == 1:
            say("interrupted")
        raise typer.Exit(128 + numbers[-1]) from None
    finally:
        restore()
