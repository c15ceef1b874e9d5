"""What is seen of a comparison while it runs."""

import contextlib
import io
from collections.abc import Callable, Iterator

from fusion_bench.utils.instantiate_utils import set_print_function_call
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class _Nowhere(io.TextIOBase):
    """Takes all that FusionBench prints; never closed, because log handlers may keep it."""

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence standard output and error: FusionBench prints a bar for every data set and a summary for every run."""
    nowhere = _Nowhere()
    with set_print_function_call(False), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def progress_bars(console: Console | None) -> Progress:
    """Bars on a terminal, nothing elsewhere."""
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
    """A bar that is there as long as the steps are; gives what to call with each finished one."""
    bar = progress.add_task(title, total=total)
    try:
        yield lambda step: progress.advance(bar)
    finally:
        progress.remove_task(bar)
