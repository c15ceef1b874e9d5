"""The long table of results: in each row one number, and what it belongs to.

What reads the files of a run returns such rows. A table is a pivot of them, a chart a function of
them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from .metrics import LAYER_METRICS, AccuracyMatrix, Mean

Row = dict[str, Any]

#: What does not apply to a number is missing. Scores are fractions.
COLUMNS = [
    "modelpool",
    "method",  # its label, or ``pretrained`` or ``individual`` for the single models
    "seed",
    "step",  # from 1
    "task",
    "layer",
    "metric",  # a name of pages/metrics.py
    "value",
]


def long_table(rows: Iterable[Row]) -> pd.DataFrame:
    # A table without rows has the columns, too, which its readers select.
    return pd.DataFrame(list(rows), columns=COLUMNS)


def rows_with(table: pd.DataFrame, /, **values: Any) -> pd.DataFrame:
    """Return the rows whose columns have these values, or one of the values of a list."""
    for column, value in values.items():
        if isinstance(value, list):
            table = table[table[column].isin(value)]
        else:
            table = table[table[column] == value]
    return table


def score_rows(matrix: AccuracyMatrix) -> list[Row]:
    """Return the scores of a run after each step, and the metrics that follow from them."""
    rows: list[Row] = []
    for step, scores in enumerate(matrix.values.tolist(), 1):
        for task, score in zip(matrix.tasks, scores, strict=True):
            rows.append({"step": step, "task": task, "metric": "score", "value": score})
    for step, mean in enumerate(matrix.mean_seen.tolist(), 1):
        rows.append({"step": step, "metric": "seen", "value": mean})
    for name, value in matrix.metrics().items():
        rows.append({"metric": name, "value": value})
    return [row for row in rows if not math.isnan(row["value"])]


def single_model_rows(scores: Mapping[str, float | None]) -> list[Row]:
    """Return the scores of single models by task, and their mean."""
    scored = {task: score for task, score in scores.items() if score is not None}
    rows: list[Row] = []
    for task, score in scored.items():
        rows.append({"task": task, "metric": "score", "value": score})
    if scored:
        rows.append({"metric": "ACC", "value": Mean.of(scored.values()).mean})
    return rows


def layer_rows(measured: pd.DataFrame) -> pd.DataFrame:
    """Return what a method measured of its layers, given the rows of ``layers.csv``; a step without
    a filter or an adapter, as the first one is, has no number of it.
    """
    names = [name for name in LAYER_METRICS if name in measured]
    keys = [name for name in ("step", "task", "layer") if name in measured]
    present = measured.copy()
    for name in names:
        presence = LAYER_METRICS[name].presence
        if presence in measured:
            present[name] = measured[name].where(measured[presence] > 0)
    rows = present.melt(keys, names, "metric", "value").dropna(subset="value")
    return rows.reindex(columns=COLUMNS)


def means(
    table: pd.DataFrame, by: str, methods: Sequence[str], columns: Sequence[Any]
) -> pd.DataFrame:
    """Return a :class:`Mean` over the seeds for each method and each of the ``columns``, which are
    values of the column ``by``.
    """
    table = rows_with(table, **{by: list(columns)})
    values = table["value"].to_numpy(dtype=float)
    means_by_key = {}
    for key, positions in table.groupby(["method", by]).indices.items():
        means_by_key[key] = Mean.of(values[positions])
    none = Mean.of([])
    grid = []
    for method in methods:
        grid.append([means_by_key.get((method, column), none) for column in columns])
    return pd.DataFrame(grid, index=list(methods), columns=list(columns), dtype=object)
