"""What a continual run leaves behind: a table for the eye, JSON and CSV for programs, a picture."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from fusion_bench_nufilt.storage.files import atomic_file, write_text

from .metrics import METRICS, AccuracyMatrix, or_none


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
    """Write ``accuracy_matrix.json``, ``.csv`` and ``.png``; scores are fractions, missing ones null or empty.

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
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", "merged_task", *matrix.tasks])
    for step, (task, row) in enumerate(zip(matrix.tasks, matrix.rows(), strict=True), 1):
        writer.writerow([step, task, *row])
    write_text(folder / "accuracy_matrix.csv", text.getvalue())
    with atomic_file(folder / "accuracy_matrix.png") as temporary:
        plot_matrix(matrix, title=str(about.get("method", ""))).savefig(temporary, dpi=150, format="png")


def plot_matrix(matrix: AccuracyMatrix, title: str = "") -> Figure:
    """A heat map of the accuracy matrix, in per cent."""
    count = len(matrix.tasks)
    figure = Figure(figsize=(2.4 + 0.62 * count, 2.0 + 0.46 * count), layout="constrained")
    axes = figure.add_subplot()
    image = draw_matrix(axes, matrix)
    axes.set_xticks(range(count), matrix.tasks, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(count), [f"{step}  + {task}" for step, task in enumerate(matrix.tasks, 1)])
    axes.set_xlabel("task")
    axes.set_ylabel("after merging")
    axes.set_title(f"{title}\n{summary(matrix)}".strip(), fontsize=11)
    figure.colorbar(image, ax=axes, label="score (%)")
    return figure


def draw_matrix(axes: Axes, matrix: AccuracyMatrix, fontsize: float = 9) -> AxesImage:
    """The scores in per cent as colours and numbers, without labels."""
    image = axes.imshow(100 * matrix.values, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for (step, task), value in np.ndenumerate(100 * matrix.values):
        if not math.isnan(value):
            color = "white" if value < 60 else "black"
            axes.text(task, step, f"{value:.0f}", ha="center", va="center", color=color, fontsize=fontsize)
    return image


def percent(value: float, *, sign: bool = False) -> str:
    """A fraction in per cent, with one decimal; ``-`` where there is none."""
    if math.isnan(value):
        return "-"
    return f"{100 * value:+.1f}" if sign else f"{100 * value:.1f}"
