"""The CSV file, the picture and the page of a continual run, made from ``accuracy_matrix.json``."""

from dataclasses import dataclass
from typing import Any

import pandas as pd
from altair.typing import ChartType

from fusion_bench_nufilt.storage.schemas import Score, Seconds

from .charts import bars_by_step, by_depth, lines, score_maps
from .metrics import AccuracyMatrix
from .names import kind
from .page import Outputs, Tables, render_page
from .tables import to_csv

#: The columns of layers.csv that the explorer shows, and their titles there.
QUANTITIES = {
    "filtered_share": "share of the task vector that the filter took",
    "overlap": "overlap of new and old subspaces",
    "loss_before": "data-free loss before the adapter",
    "loss_after": "data-free loss after it",
    "task_norm": "norm of the task vector",
    "merged_norm": "norm of what was merged before",
}


@dataclass(frozen=True)
class RunContent:
    """The content of a run's ``accuracy_matrix.json``."""

    method: str
    config: dict[str, Any]
    models: dict[str, Any]
    versions: dict[str, str]
    merge_seconds: list[Seconds]
    tasks: list[str]
    accuracy_matrix: list[list[Score | None]]

    def __post_init__(self) -> None:
        AccuracyMatrix.from_rows(self.tasks, self.accuracy_matrix)


def run_outputs(run: RunContent, tables: Tables) -> Outputs:
    """Make ``accuracy_matrix.csv``, with fractions, a picture of it and the page."""
    matrix = AccuracyMatrix.from_rows(run.tasks, run.accuracy_matrix)
    tasks, scores, summary = matrix.tasks, matrix.percents, matrix.summary()
    rows = [
        [step, task, *row]
        for step, (task, row) in enumerate(zip(tasks, matrix.values, strict=True), 1)
    ]
    fractions = pd.DataFrame(rows, columns=["step", "merged_task", *tasks])
    page = render_page(
        "run.html",
        run=run,
        summary=summary,
        matrix=score_maps({"scores": scores}, matrix.steps, tasks),
        bars=bars_by_step({"score": scores}, tasks),
        steps=_steps(matrix, run.merge_seconds),
        layers=layer_charts(tables["layers"]) if "layers" in tables else None,
    )
    picture = score_maps({f"{run.method}\n{summary}": scores}, matrix.steps, tasks, panels=1)
    return Outputs(page, {"accuracy_matrix": picture}, {"accuracy_matrix.csv": to_csv(fractions)})


def _steps(matrix: AccuracyMatrix, seconds: list[float]) -> pd.DataFrame:
    """Return what each step did for its own task; how long it took may not be known of all."""
    own, last = 100 * matrix.values.diagonal(), 100 * matrix.values[-1]
    steps = pd.DataFrame(
        {"task": matrix.tasks, "score right after it": own, "score at the end": last}
    )
    steps["change"], steps["merging s"] = last - own, pd.Series(seconds, dtype=float)
    steps.insert(0, "step", steps.index + 1)
    return steps


def layer_charts(rows: pd.DataFrame) -> tuple[ChartType, ChartType | None]:
    """Draw the layer explorer and, for several steps, means over the layers, given the rows of
    ``layers.csv``.
    """
    numbers = sorted(rows["step"].unique().tolist())
    steps = [part.set_index("layer") for _, part in rows.groupby("step")]
    known = {key: title for key, title in QUANTITIES.items() if key in rows}
    explorer = by_depth(
        {title: [step[key].to_dict() for step in steps] for key, title in known.items()}, numbers[0]
    )
    if len(numbers) == 1:
        return explorer, None
    kinds = rows["layer"].map(kind)
    means = rows.groupby(["step", kinds])[list(known)].mean().unstack()
    # The kinds are in the explorer's order, so that the colours match.
    curves = {
        title: {name: means[key, name].tolist() for name in kinds.unique()}
        for key, title in known.items()
    }
    return explorer, lines(curves, numbers, "step")
