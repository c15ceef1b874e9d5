"""The CSV file, the picture and the page of a continual run, made from ``accuracy_matrix.json``."""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from fusion_bench_nufilt.utils.files import Score, Seconds

from .charts import score_maps
from .layers import layer_charts
from .metrics import AccuracyMatrix
from .page import Layers, Outputs, render_page
from .pictures import draw
from .results import layer_rows
from .tables import to_csv


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
    scored: str  # on what data, in words
    data_seconds: Seconds | None = None  # of setting up data, if the method needs any

    def __post_init__(self) -> None:
        # A matrix of another shape is refused when the file is read, with the field's name.
        AccuracyMatrix.from_rows(self.tasks, self.accuracy_matrix)


def run_outputs(run: RunContent, measured: Layers) -> Outputs:
    """Make ``accuracy_matrix.csv``, with fractions, a picture of it and the page."""
    matrix = AccuracyMatrix.from_rows(run.tasks, run.accuracy_matrix)
    fractions = pd.DataFrame(matrix.values, columns=matrix.tasks)
    # A task may be called so, too: of two columns of one name, the task's is the later one.
    fractions.insert(0, "step", range(1, 1 + len(matrix.tasks)), allow_duplicates=True)
    fractions.insert(1, "merged_task", matrix.tasks, allow_duplicates=True)
    summary = matrix.summary()
    picture = draw(score_maps({f"{run.method}: {summary}, scored on {run.scored}": matrix}))
    layers = {}
    if measured is not None:
        charts = layer_charts(layer_rows(measured))
        layers = {name: draw(chart) for name, chart in charts.items()}
    page = render_page(
        "run.html",
        run=run,
        summary=summary,
        matrix=picture,
        steps=_steps(matrix, run.merge_seconds),
        layers=layers,
    )
    return Outputs(page, {"accuracy_matrix": picture}, {"accuracy_matrix.csv": to_csv(fractions)})


def _steps(matrix: AccuracyMatrix, seconds: list[float]) -> pd.DataFrame:
    """Return what each step did for its own task; how long it took may not be known of all."""
    steps = pd.DataFrame({"step": matrix.steps})
    steps["score right after it"] = 100 * matrix.values.diagonal()
    steps["score at the end"] = 100 * matrix.values[-1]
    steps["change"] = steps["score at the end"] - steps["score right after it"]
    # The first tasks may be those of `_merged_`, which took no time of this run.
    last_steps = steps.index[len(steps) - len(seconds) :]
    steps["merging s"] = pd.Series(seconds, last_steps, dtype=float)
    return steps
