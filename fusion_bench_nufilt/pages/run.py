"""The CSV file, the picture and the page of a continual run, made from ``accuracy_matrix.json``."""

from dataclasses import dataclass
from typing import Any

import pandas as pd
from altair.typing import ChartType

from fusion_bench_nufilt.storage.schemas import Score, Seconds

from .charts import bars_by_step, by_depth, heat_maps, lines
from .metrics import AccuracyMatrix
from .names import kind
from .page import Files, Page, Tables

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
class Run:
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


def run_files(run: Run, tables: Tables) -> Files:
    """Make ``accuracy_matrix.csv``, with fractions, a picture of it and the page."""
    matrix = AccuracyMatrix.from_rows(run.tasks, run.accuracy_matrix)
    rows = [[step, task, *row] for step, (task, row) in enumerate(zip(matrix.tasks, matrix.rows(), strict=True), 1)]
    scores = pd.DataFrame(rows, columns=["step", "merged_task", *matrix.tasks])
    texts = {"accuracy_matrix.csv": scores.to_csv(index=False, lineterminator="\n")}
    picture = _heat_map(matrix, f"{run.method}\n{matrix.summary()}", panels=1)
    return Files(_page(run, matrix, tables.get("layers")), {"accuracy_matrix": picture}, texts)


def _heat_map(matrix: AccuracyMatrix, title: str, panels: int = 0) -> ChartType:
    look: Any = {"domain": (0, 100), "legend": "score (%)", "panels": panels}
    scores = (100 * matrix.values).tolist()
    return heat_maps({title: scores}, matrix.steps, matrix.tasks, ("after", "task"), **look)


def _page(run: Run, matrix: AccuracyMatrix, layers: pd.DataFrame | None) -> Page:
    tasks = matrix.tasks
    page = Page(f"{run.method}: {len(tasks)} models merged", matrix.summary())
    page.heading("Scores after each step (%)")
    page.chart(_heat_map(matrix, "scores"))
    page.chart(bars_by_step({"score": (100 * matrix.values).tolist()}, tasks))
    page.heading("Steps")
    own, last = (100 * scores for scores in (matrix.values.diagonal(), matrix.values[-1]))
    seconds = pd.Series(run.merge_seconds, dtype=float).reindex(range(len(tasks)))
    columns = [range(1, len(tasks) + 1), tasks, own, last, last - own, seconds]
    header = ["step", "task", "score right after it", "score at the end", "change", "merging s"]
    page.table(header, zip(*columns, strict=True), digits=1)
    if layers is not None:
        page.heading("Layers")
        layer_charts(page, layers)
    page.configuration({"method": run.config, "models": run.models, "versions": run.versions})
    return page


def layer_charts(page: Page, rows: pd.DataFrame) -> None:
    """Write the layer explorer and, for several steps, means over the layers, given the rows of ``layers.csv``."""
    numbers = sorted(rows["step"].unique().tolist())
    steps = [part.set_index("layer") for _, part in rows.groupby("step")]
    known = {key: title for key, title in QUANTITIES.items() if key in rows}
    page.words("One point is a layer; hover for its name.")
    page.chart(by_depth({title: [step[key].to_dict() for step in steps] for key, title in known.items()}, numbers[0]))
    if len(numbers) == 1:
        return
    means = rows.assign(kind=rows["layer"].map(kind)).groupby(["step", "kind"])[list(known)].mean().unstack("kind")
    kinds = rows["layer"].map(kind).unique()  # in the explorer's order, so that the colours match
    curves = {title: {name: means[key, name].tolist() for name in kinds} for key, title in known.items()}
    page.words("Means over the layers, by step:")
    page.chart(lines(curves, numbers, "step"))
