"""The accuracy matrix of a continual run as a table in the terminal, a line of words, and a JSON file."""

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from fusion_bench_nufilt.storage.files import write_text

from .metrics import METRICS, AccuracyMatrix, or_none, percent


def print_matrix(matrix: AccuracyMatrix, title: str) -> None:
    """Print the accuracy matrix and its headline metrics in per cent; rows are steps and columns tasks, as merged."""
    table = Table(title=title, caption=summary(matrix))
    table.add_column("after step")
    for number, task in enumerate(matrix.tasks, 1):
        # Twenty names do not fit beside each other; the rows say which number is which.
        table.add_column(task if len(matrix.tasks) <= 8 else str(number), justify="right", no_wrap=True)
    for step, task in enumerate(matrix.tasks, 1):
        row = [percent(value) for value in matrix.values[step - 1]]
        table.add_row(f"{step} {task}", *row, style="bold" if step == len(matrix.tasks) else "")
    print_table(table)


def print_table(table: Table) -> None:
    """Print a table to standard output, whole also where that is no terminal."""
    console = Console()
    if not console.is_terminal:  # a pipe has no width of its own, and a cropped table is of no use
        console = Console(width=_width(table))
    console.print(table)


def fits_terminal(table: Table) -> bool:
    """Would :func:`print_table` show all of it?"""
    console = Console()
    return not console.is_terminal or _width(table) <= console.width


def _width(table: Table) -> int:
    console = Console()
    return Measurement.get(console, console.options.update(max_width=1000), table).maximum


def summary(matrix: AccuracyMatrix) -> str:
    """The headline metrics in one line, in per cent, saying what is missing."""
    headline = ((name, METRICS[name], value) for name, value in matrix.metrics().items() if not math.isnan(value))
    texts = (f"{name} {percent(value, sign=metric.signed)}" for name, metric, value in headline if metric.headline)
    line = "   ".join(texts) or "no score"
    if matrix.missing and len(matrix.missing) < len(matrix.tasks):
        measured = len(matrix.tasks) - len(matrix.missing)
        line += f"   ({measured} of {len(matrix.tasks)} tasks; no score for {', '.join(matrix.missing)})"
    return line


def save_matrix(matrix: AccuracyMatrix, folder: Path, about: dict[str, Any]) -> None:
    """Write ``accuracy_matrix.json``; scores are fractions, and a missing one is null.

    Args:
        matrix: the scores.
        folder: an existing folder.
        about: what else a reader needs to know (method, seed, versions); goes into the JSON file.
    """
    content = {
        **about,
        "tasks": matrix.tasks,
        "accuracy_matrix": matrix.rows(),
        **{name: or_none(value) for name, value in matrix.metrics().items()},
        "missing": matrix.missing,
    }
    write_text(folder / "accuracy_matrix.json", json.dumps(content, indent=2))
