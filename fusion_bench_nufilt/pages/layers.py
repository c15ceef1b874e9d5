"""What a method measured of the layers at each step: tables and charts of the rows that
:func:`~fusion_bench_nufilt.pages.results.layer_rows` returns.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from altair.typing import ChartType

from .charts import by_depth, lines
from .metrics import LAYER_METRICS
from .names import KINDS, kind
from .results import rows_with

_STRONGEST = 20
#: The norm of the task vectors is that of all layers or steps together; of the others, the mean.
_MEANS = ("filtered_share", "overlap")


def layer_means(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return, for every step or layer, the norm of its task vectors and the means of what the
    method measured.
    """
    norms = rows_with(rows, metric="task_norm").groupby(list(by))["value"]
    columns = {LAYER_METRICS["task_norm"].title: norms.agg(_norm)}
    for name in _MEANS:
        values = rows_with(rows, metric=name)
        if len(values):
            columns[LAYER_METRICS[name].title] = values.groupby(list(by))["value"].mean()
    return pd.DataFrame(columns).reset_index()


def _norm(norms: "pd.Series[float]") -> float:
    return float(np.linalg.norm(norms))


def strongest_layers(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the means of the layers that the tasks change most, the strongest first."""
    means = layer_means(rows, ["layer"])
    return means.sort_values(LAYER_METRICS["task_norm"].title, ascending=False).head(_STRONGEST)


def layer_charts(rows: pd.DataFrame) -> dict[str, ChartType]:
    """Draw what was measured of the layers.

    ``by_layer`` has the means over the steps and, where there are several, ``by_step`` those over
    the layers of a kind.
    """
    if rows.empty:
        return {}
    titles = {name: metric.title for name, metric in LAYER_METRICS.items()}
    rows = rows.assign(panel=rows["metric"].map(titles), y=rows["value"])
    by_layer = rows.groupby(["panel", "layer"], sort=False)["y"].mean().reset_index()
    charts = {"by_layer": by_depth(by_layer.to_dict("records"))}
    if rows["step"].nunique() > 1:
        rows = rows.assign(name=rows["layer"].map(kind), x=rows["step"])
        by_step = rows.groupby(["panel", "name", "x"], sort=False)["y"].mean().reset_index()
        charts["by_step"] = lines(by_step.to_dict("records"), "step", "", among=KINDS)
    return charts
