"""The page of a run: accuracy matrix, scores by step, layers."""

import csv
from pathlib import Path
from typing import Any

from .charts import bars_by_step, by_depth, heat_maps, layers_by_kind, lines
from .page import Page

#: Columns of layers.csv that the explorer shows, and what they are called there.
QUANTITIES = {
    "filtered_share": "share of the task vector that the filter took",
    "overlap": "overlap of new and old subspaces",
    "loss_before": "data-free loss before the adapter",
    "loss_after": "data-free loss after it",
    "task_norm": "norm of the task vector",
    "merged_norm": "norm of what was merged before",
}


def run_page(folder: Path, content: dict[str, Any]) -> Page:
    """From ``accuracy_matrix.json`` and, if it is there, ``layers.csv``."""
    tasks, matrix = content["tasks"], percent(content["accuracy_matrix"])
    scores = f"ACC {_percent(content['ACC'])}, BWT {_percent(content['BWT'], sign=True)}"
    page = Page(f"{content['method']}: {len(tasks)} models merged", scores)
    if content["missing"]:
        page.words(f"No score, and not in the means: {', '.join(content['missing'])}.")
    page.heading("Scores after each step (%)")
    steps = [f"{number} + {task}" for number, task in enumerate(tasks, 1)]
    page.chart(heat_maps({"scores": matrix}, steps, tasks, ("after", "task")))
    page.chart(bars_by_step({"score": matrix}, tasks))
    page.heading("Steps")
    header = ["step", "task", "score right after it", "score at the end", "change", "merging s"]
    page.table(header, _steps(content, matrix), digits=1)
    if (file := folder / "layers.csv").is_file():
        _layers(page, file)
    page.heading("Configuration")
    page.details("method", content["config"])
    page.details("models", content["models"])
    page.details("versions", content["versions"])
    return page


def _steps(content: dict[str, Any], matrix: list[list[float | None]]) -> list[list[Any]]:
    rows = []
    for number, task in enumerate(content["tasks"]):
        own, last = matrix[number][number], matrix[-1][number]
        change = None if own is None or last is None else last - own
        seconds = content["merge_seconds"][number] if number < len(content["merge_seconds"]) else None
        rows.append([number + 1, task, own, last, change, seconds])
    return rows


def _layers(page: Page, file: Path) -> None:
    """The layer explorer, and layer means by step."""
    with file.open(newline="") as text:
        rows = list(csv.DictReader(text))
    if not rows:
        return
    steps = sorted({int(row["step"]) for row in rows})
    values = {
        title: [{row["layer"]: float(row[key]) for row in rows if int(row["step"]) == step} for step in steps]
        for key, title in QUANTITIES.items()
        if key in rows[0]
    }
    page.heading("Layers")
    page.words("One point is a layer; hover for its name.")
    page.chart(by_depth(values))
    kinds = layers_by_kind(row["layer"] for row in rows if int(row["step"]) == steps[0])
    means = {
        title: {kind: [_mean([step[layer] for layer in layers]) for step in by_step] for kind, layers in kinds.items()}
        for title, by_step in values.items()
    }
    page.words("Means over the layers, by step:")
    page.chart(lines(means, steps, "step"))


def percent(matrix: list[list[float | None]]) -> list[list[float | None]]:
    """Fractions as per cent; what is missing stays so."""
    return [[None if value is None else 100 * value for value in row] for row in matrix]


def _percent(value: float | None, *, sign: bool = False) -> str:
    return "-" if value is None else f"{100 * value:+.1f} %" if sign else f"{100 * value:.1f} %"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
