"""The pictures and the page of an analysis, drawn from its files alone."""

from collections.abc import Mapping
from typing import NotRequired

import altair as alt
from altair.typing import ChartType
from typing_extensions import TypedDict

from .charts import by_depth, heat_maps, lines
from .content import Json
from .metrics import METRICS
from .page import Layers, Outputs, render_page
from .pictures import draw
from .theme import Rows, cells

_BOTH = ("stability", "plasticity")
_LOSSES = {key: f"{key} loss" for key in _BOTH} | {
    key: f"{key} mean" for key in ("harmonic", "arithmetic")
}
_INPUTS = {"fixed": "fixed inputs", "relative": "fixed inputs, relative"}
_FROM_0_TO_1 = {"scale": alt.Scale(domain=[0, 1])}


class AnalysisSummary(TypedDict):
    """The content of ``analysis.json``; what was not measured is left out, and what is not finite
    is None.
    """

    about: Json
    tasks: list[str]
    names: list[str]  # of the task vectors that change a layer
    task_rank: int
    layers: list[Json]  # those that a task changes
    unchanged_layers: NotRequired[int]
    vectors: dict[str, dict[str, float | None]]  # means over the layers, by task vector
    #: Of each two task vectors, mean over layers, by their kind; and by chance.
    overlap: dict[str, list[list[float | None]]]
    chance: NotRequired[dict[str, float | None]]
    common_layers: NotRequired[list[list[int]]]  # how many layers two task vectors both change
    energy: dict[str, list[float]]  # the share of the first directions, by task vector
    layers_of: NotRequired[dict[str, dict[str, float]]]  # means of each layer, by their title
    affinity: NotRequired[dict[str, Json]]  # of data and task vectors, by kind of layers
    affinity_by_rank: NotRequired[dict[str, list[float]]]
    methods: NotRequired[dict[str, Json]]  # losses and scores
    failures: NotRequired[dict[str, str]]  # why a method has none
    versions: NotRequired[Json]
    reading: list[str]  # sentences


def analysis_outputs(content: AnalysisSummary, _: Layers) -> Outputs:
    """Make the page, and each picture for which there are numbers."""
    drawings = {name: draw(chart) for name, chart in charts_of_analysis(content).items()}
    page = render_page(
        "analysis.html", content=content, charts=drawings, measured=_measured(content)
    )
    return Outputs(page, drawings)


def charts_of_analysis(content: AnalysisSummary) -> dict[str, ChartType]:
    """Return, by name, each chart for which there are numbers."""
    charts = {"spectra": _energy(content)}
    if len(content["names"]) > 1:
        charts["overlap"] = _overlap(content)
    if "affinity" in content:
        charts["affinity"] = _affinity(content)
        charts["affinity_by_rank"] = _by_rank(content)
    if content.get("layers_of"):
        charts["layers"] = by_depth(_layer_means(content))
    measured = _measured(content)
    if measured:
        charts["losses"] = _losses(measured)
    return charts


def _layer_means(content: AnalysisSummary) -> Rows:
    rows: Rows = []
    for quantity, values in content["layers_of"].items():
        for layer, value in values.items():
            rows.append({"panel": quantity, "layer": layer, "y": value})
    return rows


def _affinity(content: AnalysisSummary) -> ChartType:
    tasks = content["tasks"]
    kinds = [layer["kind"] for layer in content["layers"]]
    rows: Rows = []
    for group, matrices in content["affinity"].items():
        count = len(kinds) if group == "all" else kinds.count(group)
        for key, words in (("mean", "mean"), ("p90", "90th percentile")):
            rows += cells(matrices[key], tasks, tasks, f"{group}: {words} over {count} layers")
    # Beside each mean stands the percentile of the same layers.
    return heat_maps(rows, tasks, tasks, ("data of", "task vector of"), "affinity", across=2)


def _by_rank(content: AnalysisSummary) -> ChartType:
    curves = content["affinity_by_rank"]
    titles = {
        "diagonal": "matched: the task's own vector",
        "off_diagonal": "mismatched: another task's",
        "chance": "chance",
    }
    rows: Rows = []
    for key, title in titles.items():
        # Of one task there are no mismatched pairs, and their curve is empty.
        for rank, value in zip(curves["ranks"], curves[key], strict=False):
            rows.append({"name": title, "x": str(rank), "y": value})
    return lines(
        rows,
        "rank r = r_d = r_v",
        "affinity, mean over layers and pairs",
        y_scale=_FROM_0_TO_1,
    )


def _overlap(content: AnalysisSummary) -> ChartType:
    """Draw how far the task vectors overlap, without the overlap of each with itself, which is
    1.
    """
    names = content["names"]
    rows: Rows = []
    for group, matrix in content["overlap"].items():
        pairs = cells(matrix, names, names, f"{group} layers")
        rows += [pair for pair in pairs if pair["row"] != pair["column"]]
    legend = f"overlap of the top {content['task_rank']} directions"
    return heat_maps(rows, names, names, ("task vector", "other task vector"), legend)


def _energy(content: AnalysisSummary) -> ChartType:
    rows: Rows = []
    for name, shares in content["energy"].items():
        for direction, share in enumerate(shares, 1):
            rows.append({"name": name, "x": direction, "y": share})
    rows.append({"level": 0.9, "words": "90 %"})
    title = "share of the energy, mean over layers"
    return lines(rows, "directions", title, y_scale=_FROM_0_TO_1, dots=False)


def _measured(content: AnalysisSummary) -> dict[str, Json]:
    """Return the methods whose losses are known beyond the first step, with their scores in per
    cent.
    """
    measured = {}
    for method, row in content.get("methods", {}).items():
        if "fixed" not in row:
            continue
        measured[method] = dict(row)
        for name in ("ACC", "BWT"):
            if row.get(name) is not None:
                measured[method][METRICS[name].title] = 100 * row[name]
    return measured


def _losses(measured: Mapping[str, Json]) -> ChartType:
    """Draw the losses of each method by step, with a panel for each loss and choice of inputs."""
    rows: Rows = []
    for inputs, words in _INPUTS.items():
        for loss, title in _LOSSES.items():
            for name, row in measured.items():
                losses = row[inputs]
                for step, value in zip(losses["steps"], losses[loss], strict=True):
                    panel = f"{title}, {words}"
                    rows.append({"panel": panel, "name": name, "x": step, "y": value})
    values = [row["y"] for row in rows if row["y"]]
    scale = alt.Scale(zero=True)
    title = "loss"
    # Methods that differ by orders of magnitude can't be read off a linear axis.
    if values and max(values) > 50 * min(values):
        scale = alt.Scale(type="log", nice=False, padding=12)
        title = "loss, log scale"
        rows = [row for row in rows if row["y"]]  # 0 has no logarithm
    return lines(rows, "step", title, y_scale={"scale": scale})
