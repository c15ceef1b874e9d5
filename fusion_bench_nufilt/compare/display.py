"""What a terminal shows of a comparison while it runs."""

import contextlib
import io
import logging
from collections.abc import Callable, Iterator

from fusion_bench.utils.instantiate_utils import set_print_function_call
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class _Nowhere(io.TextIOBase):
    """A stream that drops all that FusionBench prints. It is never closed, because log handlers may keep it."""

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence standard output and error, and FusionBench's log but for errors.

    FusionBench prints a bar for every data set, every call it makes, and a summary of every run.
    """
    nowhere = _Nowhere()
    chatty = [logging.getLogger(name) for name in ("fusion_bench", "lightning.fabric")]
    levels = [logger.level for logger in chatty]
    for logger in chatty:
        logger.setLevel(logging.ERROR)
    try:
        with set_print_function_call(False), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
    finally:
        for logger, level in zip(chatty, levels, strict=True):
            logger.setLevel(level)


def progress_bars(console: Console | None) -> Progress:
    """Make progress bars that are shown on a terminal only."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shown = console is not None and console.is_terminal
    return Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        disable=not shown,
        redirect_stdout=False,
        redirect_stderr=False,
    )


@contextlib.contextmanager
def steps_bar(progress: Progress, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar while a block runs, and give the block a function to call with each finished step."""
    bar = progress.add_task(title, total=total)
    try:
        yield lambda step: progress.advance(bar)
    finally:
        progress.remove_task(bar)
