"""The CSV file, the picture and the page of a continual run, made from ``accuracy_matrix.json``."""

from dataclasses import dataclass
from typing import Any

import pandas as pd
from altair.typing import ChartType

from fusion_bench_nufilt.storage.schemas import Score, Seconds

from .charts import by_depth, lines, score_maps
from .metrics import AccuracyMatrix
from .names import kind
from .page import Outputs, Tables, render_page
from .tables import to_csv
from .theme import cells

#: The columns of layers.csv that are drawn, and their titles.
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
    fractions = pd.DataFrame(matrix.values, columns=matrix.tasks)
    fractions.insert(0, "step", range(1, 1 + len(matrix.tasks)))
    fractions.insert(1, "merged_task", matrix.tasks)
    summary = matrix.summary()
    scores = cells(matrix.percents, matrix.steps, matrix.tasks, f"{run.method}: {summary}")
    picture = score_maps(scores, matrix.steps, matrix.tasks)
    page = render_page(
        "run.html",
        run=run,
        summary=summary,
        matrix=picture,
        steps=_steps(matrix, run.merge_seconds),
        layers=layer_charts(tables["layers"]) if "layers" in tables else {},
    )
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


def layer_charts(table: pd.DataFrame) -> dict[str, ChartType]:
    """Draw what was measured of the layers, given the rows of ``layers.csv``.

    ``by_layer`` has the means over the steps and, where there are several, ``by_step`` those over
    the layers of a kind.
    """
    known = [key for key in QUANTITIES if key in table]
    rows = table.melt(["layer", "step"], known, "quantity", "y").dropna(subset="y")
    if rows.empty:
        return {}
    rows["panel"] = rows["quantity"].map(QUANTITIES)
    by_layer = rows.groupby(["panel", "layer"], sort=False)["y"].mean().reset_index()
    charts = {"by_layer": by_depth(by_layer.to_dict("records"))}
    if rows["step"].nunique() > 1:
        # The kinds are in the order of the layers, and have the same colours in both charts.
        rows = rows.assign(name=rows["layer"].map(kind), x=rows["step"])
        by_step = rows.groupby(["panel", "name", "x"], sort=False)["y"].mean().reset_index()
        look: Any = {"size": (260, 180), "across": 3, "own_scales": ["y"]}
        charts["by_step"] = lines(by_step.to_dict("records"), "step", "", **look)
    return charts
