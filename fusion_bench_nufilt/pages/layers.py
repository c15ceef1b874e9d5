"""What a method measured of the layers at each step: tables and charts of the rows of
``layers.csv``.
"""

from typing import Any

import numpy as np
import pandas as pd
from altair.typing import ChartType

from .charts import by_depth, lines
from .names import kind

#: The columns of layers.csv that are drawn, and their titles.
QUANTITIES = {
    "filtered_share": "share of the task vector that the filter took",
    "overlap": "overlap of new and old subspaces",
    "loss_before": "data-free loss before the adapter",
    "loss_after": "data-free loss after it",
    "task_norm": "norm of the task vector",
    "merged_norm": "norm of what was merged before",
}


_STRONGEST = 20
_MEANS = {"filtered_share": "share filtered", "overlap": "overlap of subspaces"}
_NORM = "norm of task vectors"


def layer_means(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return, for every step or layer, the norm of its task vectors and the means of what the
    method measured.
    """
    groups = table.groupby(by)
    norms = groups["task_norm"].agg(lambda norms: float(np.linalg.norm(norms))).rename(_NORM)
    known = {key: title for key, title in _MEANS.items() if key in table}
    means = groups[list(known)].mean().rename(columns=known)
    return pd.concat([norms, means], axis=1).reset_index()


def strongest_layers(table: pd.DataFrame) -> pd.DataFrame:
    """Return the means of the layers that the tasks change most, the strongest first."""
    means = layer_means(table, ["layer"])
    return means.sort_values(_NORM, ascending=False).head(_STRONGEST)


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
