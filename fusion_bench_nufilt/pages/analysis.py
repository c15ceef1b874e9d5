"""The pictures and the page of an analysis, drawn from its files alone."""

from collections.abc import Mapping
from typing import Any, NotRequired

import altair as alt
import pandas as pd
from altair.typing import ChartType
from typing_extensions import TypedDict

from .charts import beside, by_depth, heat_maps, lines
from .content import Json
from .names import depth, kind
from .page import Outputs, Tables, render_page
from .theme import COLOURS, Rows, by_block, data, style, tooltip

#: The tables beside ``analysis.json``, and the columns that are read.
MEASURED = {
    "task_vectors": "task layer effective_rank",
    "losses": "method task layer step stability plasticity data_free_stability "
    "data_free_plasticity",
    "affinity": "layer kind data vector affinity",
}
_BOTH = ("stability", "plasticity")
_LOSSES = {key: f"{key} loss" for key in _BOTH} | {
    key: f"{key} mean" for key in ("harmonic", "arithmetic")
}
_INPUTS = {"fixed": "fixed inputs", "relative": "fixed inputs, relative"}
_FROM_0_TO_1 = alt.Scale(domain=[0, 1])


class AnalysisContent(TypedDict):
    about: Json
    tasks: list[str]
    names: list[str]  # of the task vectors
    task_rank: int
    layers: list[Json]
    vectors: dict[str, dict[str, float | None]]
    overlap: dict[str, list[list[float | None]]]
    energy: dict[str, list[float]]
    reading: list[str]
    layers_of: NotRequired[dict[str, dict[str, float]]]
    affinity: NotRequired[dict[str, Json]]
    affinity_by_rank: NotRequired[dict[str, list[float]]]
    pairs: NotRequired[list[list[int]]]
    methods: NotRequired[dict[str, Json]]
    versions: NotRequired[Json]


def analysis_outputs(content: AnalysisContent, tables: Tables) -> Outputs:
    """Make the page, and each picture for which there are numbers."""
    return Outputs(_page(content, tables), pictures_of(content, tables))


def pictures_of(content: AnalysisContent, tables: Tables) -> dict[str, ChartType]:
    """Return, by name, each picture for which ``analysis.json`` and the tables beside it have
    numbers.
    """
    apart: Any = dict.fromkeys(
        ("color", "shape", "strokeDash"), "independent"
    )  # each chart has its own legend
    charts = _charts(content, tables, panels=True)
    distributions = charts.pop("distributions", None)
    pictures = {"spectra": charts.pop("energy"), **charts}
    if "task_vectors" in tables:
        ranks = _effective_ranks(tables["task_vectors"])
        pictures["spectra"] = alt.hconcat(pictures["spectra"], ranks).resolve_scale(**apart)
    if distributions is not None:
        pictures["affinity"] = alt.vconcat(pictures["affinity"], distributions).resolve_scale(
            **apart
        )
    if measured := _measured(content):
        pictures["losses"] = _losses(measured)
        if "losses" in tables:
            pictures["data_free"] = _data_free(measured, tables["losses"])
    return pictures


def _page(content: AnalysisContent, tables: Tables) -> str:
    charts, measured = _charts(content, tables, panels=False), _measured(content)
    if layers := content.get("layers_of"):
        charts["layers"] = by_depth({title: [by_layer] for title, by_layer in layers.items()})
    if measured:
        steps = next(iter(measured.values()))["fixed"]["steps"]
        charts["losses"] = lines(
            _loss_curves(measured), steps, "step", y_scale=alt.Scale(zero=True)
        )
    return render_page(
        "analysis.html",
        content=content,
        charts=charts,
        measured=measured,
    )


def _charts(content: AnalysisContent, tables: Tables, *, panels: bool) -> dict[str, ChartType]:
    """Return, by name, the charts that pictures, with ``panels``, and the page, with menus, have in
    common.
    """
    charts = {"energy": _energy(content)}
    if len(content["names"]) > 1:
        charts["overlap"] = _overlap(content, len(content["overlap"]) if panels else 0)
    if "affinity" in content:
        columns = len(content["affinity"]) if panels else 0
        charts["affinity"] = _affinity(content, columns)
        charts["affinity_by_rank"] = _by_rank(content)
        if "affinity" in tables and content["pairs"]:
            charts["distributions"] = _distributions(content, tables["affinity"], columns)
    return charts


def _affinity(content: AnalysisContent, panels: int) -> ChartType:
    tasks, kinds = content["tasks"], [layer["kind"] for layer in content["layers"]]
    maps = {
        f"{group}: {words} over {len(kinds) if group == 'all' else kinds.count(group)} layers": row[
            key
        ]
        for key, words in (("mean", "mean"), ("p90", "90th percentile"))
        for group, row in content["affinity"].items()
    }
    return heat_maps(
        maps, tasks, tasks, ("data of", "task vector of"), legend="affinity", panels=panels
    )


def _distributions(content: AnalysisContent, table: pd.DataFrame, panels: int) -> ChartType:
    """Draw the distribution over the layers of the affinities, from 0 to 1, of a high, a moderate
    and a low pair.
    """
    limits, sets, marks = [step / 200 for step in range(201)], {}, {}
    pairs = [(content["tasks"][i], content["tasks"][j]) for i, j in content["pairs"]]
    for group, row in content["affinity"].items():
        members = table[table["kind"].eq(group) | (group == "all")]
        by_pair = members.groupby(["data", "vector"])["affinity"]
        found = {f"{pair[0]} → {pair[1]}": by_pair.get_group(pair).to_numpy() for pair in pairs}
        sets[group] = {
            name: [float((values <= limit).mean()) for limit in limits]
            for name, values in found.items()
        }
        marks[group] = (row["chance"], "chance")
    look: Any = {
        "x_scale": _FROM_0_TO_1,
        "y_scale": _FROM_0_TO_1,
        "dots": False,
        "size": (300, 220),
        "panels": panels,
    }
    x_title, y_title = "affinity a (data → task vector)", "share of layers with A ≤ a"
    return lines(sets, limits, x_title, y_title, marks=marks, **look)


def _by_rank(content: AnalysisContent) -> ChartType:
    found = content["affinity_by_rank"]
    matched, mismatched = "matched: the task's own vector", "mismatched: another task's"
    titles = {"diagonal": matched, "off_diagonal": mismatched, "chance": "chance"}
    curves = {title: found[key] for key, title in titles.items() if found[key]}
    scales: Any = {"x_scale": alt.Scale(type="log", base=2), "y_scale": _FROM_0_TO_1}
    title = "affinity, mean over layers and pairs"
    return lines({"": curves}, found["ranks"], "rank r = r_d = r_v", title, **scales)


def _overlap(content: AnalysisContent, panels: int) -> ChartType:
    """Draw how far the task vectors overlap, without the overlap of each with itself, which is
    1.
    """
    names = content["names"]
    maps = {
        f"{group} layers": [
            [value if i != j else None for j, value in enumerate(row)]
            for i, row in enumerate(matrix)
        ]
        for group, matrix in content["overlap"].items()
    }
    title = f"overlap of the top {content['task_rank']} directions"
    return heat_maps(maps, names, names, ("vector", "vector"), legend=title, panels=panels)


def _energy(content: AnalysisContent) -> ChartType:
    energy, title = content["energy"], "share of the energy, mean over layers"
    directions = range(1, 1 + max(map(len, energy.values())))
    look: Any = {"heights": {"90 %": 0.9}, "y_scale": _FROM_0_TO_1, "dots": False}
    return lines({"": energy}, directions, "directions", title, **look)


def _effective_ranks(table: pd.DataFrame) -> ChartType:
    """Draw a point for each layer and task at the layer's block."""
    layers = table["layer"]
    names = layers.map(kind)
    kinds = list(names.unique())
    rows = table.assign(
        name=names, x=[beside(layer, kinds) for layer in layers], y=table["effective_rank"]
    )
    x, y, looks = (
        by_block(layers.map(depth).max()),
        alt.Y("y:Q", title="effective rank"),
        style(kinds, kinds),
    )
    points = _points(rows, x, y, 22, color=looks["color"], shape=looks["shape"])
    return points.properties(width=420, height=320)


def _measured(content: AnalysisContent) -> dict[str, Json]:
    """Return the methods whose losses are known beyond the first step, with their scores in per
    cent.
    """
    found = {}
    for name, row in content.get("methods", {}).items():
        if "fixed" in row:
            scores = {
                f"{key} %": 100 * row[key] for key in ("ACC", "BWT") if row.get(key) is not None
            }
            found[name] = row | scores
    return found


def _loss_curves(measured: Mapping[str, Json]) -> dict[str, dict[str, list[float | None]]]:
    """Return the losses of each method by step, in a set for each loss and each choice of
    inputs.
    """
    return {
        f"{title}, {words}": {name: row[inputs][loss] for name, row in measured.items()}
        for inputs, words in _INPUTS.items()
        for loss, title in _LOSSES.items()
        if all(loss in row.get(inputs, {}) for row in measured.values())
    }


def _losses(measured: Mapping[str, Json]) -> ChartType:
    """Draw the losses by step, with a row of panels for each choice of inputs."""
    steps, panels = next(iter(measured.values()))["fixed"]["steps"], []
    for title, curves in _loss_curves(measured).items():
        values = [value for curve in curves.values() for value in curve if value]
        scale = alt.Scale(zero=True)
        if values and max(values) > 50 * min(values):
            scale = alt.Scale(type="log", nice=False, padding=12)
            curves = {
                name: [value or None for value in curve] for name, curve in curves.items()
            }  # 0 has no logarithm
        panels.append(
            lines({title: curves}, steps, "step", y_scale=scale, size=(220, 170), panels=1)
        )
    return alt.concat(*panels, columns=len(_LOSSES))


def _data_free(measured: Mapping[str, Json], table: pd.DataFrame) -> ChartType:
    """Plot the measured losses against the data-free ones: a panel per method, a point per layer
    and step.
    """
    axis = alt.Axis(grid=False, labelSeparation=10)
    look: Any = {"title": None, "scale": alt.Scale(type="log", nice=False, padding=8), "axis": axis}
    charts = []
    for loss in _BOTH:
        known = table.assign(name=table["method"], x=table[f"data_free_{loss}"], y=table[loss])
        known = known[(known["step"] > 1) & (known["x"] > 0) & (known["y"] > 0)]
        panels = []
        for method, row in measured.items():
            if len(rows := known[known["method"] == method]):
                rho = row["rank_correlation"][loss]["layers"]
                title = f"{method}: rho {'none' if rho is None else f'{rho:.2f}'}"
                panel = _points(rows, alt.X("x:Q", **look), alt.Y("y:Q", **look), 10)
                panels.append(panel.properties(title=title, width=170, height=120))
        shared = alt.concat(
            *panels, columns=5, title=f"measured {loss} loss over the data-free one"
        )
        charts.append(shared.resolve_scale(x="shared", y="shared"))
    return alt.vconcat(*charts)


def _points(rows: pd.DataFrame, x: alt.X, y: alt.Y, size: int, **looks: Any) -> alt.Chart:
    """Draw one point for each row, with its layer and task for hovering."""
    shown: Rows = rows[["name", "x", "y", "layer", "task"]].to_dict("records")
    points = alt.Chart(data(shown)).mark_point(size=size, opacity=0.6, color=COLOURS[0])
    return points.encode(x=x, y=y, tooltip=tooltip(name="", layer="layer", task="task"), **looks)
