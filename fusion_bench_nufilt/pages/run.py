"""The CSV file, the picture and the page of a continual run, made from ``accuracy_matrix.json``."""

from dataclasses import dataclass
from typing import Any

import pandas as pd
from typing_extensions import TypedDict

from fusion_bench_nufilt.utils.schemas import Score, Seconds

from .charts import score_maps
from .layers import layer_charts, layer_means, strongest_layers
from .metrics import AccuracyMatrix
from .page import Outputs, Tables, render_page
from .tables import to_csv
from .theme import cells


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


class UnscoredRun(TypedDict):
    """The fields of ``run.json`` that the page of a run without scores shows."""

    method: str
    order: list[str]
    inputs: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, str]


def unscored_outputs(run: UnscoredRun, tables: Tables) -> Outputs:
    """Make the page of a run that has no scores, or none yet: what happened to its layers."""
    if "layers" not in tables:
        raise ValueError(
            "it has no scores, and its method measures no layers: run it with a task pool, such as "
            "the model pool's own (without taskpool=dummy)"
        )
    layers = tables["layers"]
    return Outputs(
        render_page(
            "unscored.html",
            run=run,
            merged=layers["step"].nunique(),
            steps=layer_means(layers, ["step", "task"]),
            strongest=strongest_layers(layers),
            layers=layer_charts(layers),
        ),
        {},
    )
