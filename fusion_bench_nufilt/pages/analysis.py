"""The pictures and the page of an analysis, drawn from its files alone."""

from collections.abc import Mapping
from typing import Any, NotRequired

import altair as alt
import numpy as np
import pandas as pd
from altair.typing import ChartType
from typing_extensions import TypedDict

from .charts import aside, by_depth, heat_maps, lines
from .page import Files, Page, Tables
from .theme import COLOURS, Rows, by_block, data, style, tooltip

Json = dict[str, Any]
Matrix = list[list[float | None]]

_BOTH = ("stability", "plasticity")
_LOSSES = {key: f"{key} loss" for key in _BOTH} | {key: f"{key} mean" for key in ("harmonic", "arithmetic")}
#: The tables beside ``analysis.json``, and the columns that are read.
MEASURED = {
    "task_vectors": "task layer effective_rank",
    "losses": "method task layer step stability plasticity data_free_stability data_free_plasticity",
    "affinity": "layer kind data vector affinity",
}
_INPUTS = {"fixed": "fixed inputs", "relative": "fixed inputs, relative", "propagated": "propagated inputs"}


class Content(TypedDict):
    about: Json
    tasks: list[str]
    names: list[str]  # of the task vectors
    task_rank: int
    layers: list[Json]
    vectors: dict[str, dict[str, float | None]]
    overlap: dict[str, Matrix]
    energy: dict[str, list[float]]
    reading: list[str]
    layers_of: NotRequired[dict[str, dict[str, float]]]
    affinity: NotRequired[dict[str, Json]]
    affinity_by_rank: NotRequired[dict[str, list[float]]]
    pairs: NotRequired[list[list[int]]]
    theorem: NotRequired[list[dict[str, float]]]
    methods: NotRequired[dict[str, Json]]
    versions: NotRequired[Json]


def analysis_files(content: Content, tables: Tables) -> Files:
    """Make the page, and each picture for which there are numbers."""
    return Files(_page(content, tables), pictures_of(content, tables))


def pictures_of(content: Content, tables: Tables) -> dict[str, ChartType]:
    """Return, by name, each picture for which ``analysis.json`` and the tables beside it have numbers."""
    apart: Any = dict.fromkeys(("color", "shape", "strokeDash"), "independent")  # each chart has its own legend
    pictures: dict[str, ChartType] = {"spectra": _energy(content)}
    if "task_vectors" in tables:
        ranks = _effective_ranks(content, tables["task_vectors"])
        pictures["spectra"] = alt.hconcat(_energy(content), ranks).resolve_scale(**apart)
    if len(content["names"]) > 1:
        pictures["overlap"] = _overlap(content, len(content["overlap"]))
    if "affinity" in content:
        columns = len(content["affinity"])
        pictures["affinity"] = _affinity(content, columns)
        if "affinity" in tables and content["pairs"]:
            below = _distributions(content, tables["affinity"], columns)
            pictures["affinity"] = alt.vconcat(pictures["affinity"], below).resolve_scale(**apart)
        pictures["affinity_by_rank"] = _by_rank(content)
    if measured := _measured(content):
        pictures["losses"] = _losses(measured)
        if "losses" in tables:
            pictures["data_free"] = _data_free(measured, tables["losses"])
    return pictures


def _affinity(content: Content, panels: int) -> ChartType:
    tasks, kinds = content["tasks"], [layer["kind"] for layer in content["layers"]]
    maps = {
        f"{group}: {words} over {len(kinds) if group == 'all' else kinds.count(group)} layers": row[key]
        for key, words in (("mean", "mean"), ("p90", "90th percentile"))
        for group, row in content["affinity"].items()
    }
    return heat_maps(maps, tasks, tasks, ("data of", "task vector of"), legend="affinity", panels=panels)


def _distributions(content: Content, table: pd.DataFrame, panels: int) -> ChartType:
    """Draw the distribution over the layers of the affinities, from 0 to 1, of a high, a moderate and a low pair."""
    tasks, sets, marks = content["tasks"], {}, {}
    grid, scale = np.arange(201) / 200, alt.Scale(domain=[0, 1])
    for group, row in content["affinity"].items():
        members = table[table["kind"].eq(group) | (group == "all")]
        by_pair = {pair: values.to_numpy() for pair, values in members.groupby(["data", "vector"])["affinity"]}
        found = {f"{tasks[i]} → {tasks[j]}": by_pair[tasks[i], tasks[j]] for i, j in content["pairs"]}
        sets[group] = {name: (values <= grid[:, None]).mean(axis=1).tolist() for name, values in found.items()}
        marks[group] = (row["chance"], "chance")
    look: Any = {"x_scale": scale, "y_scale": scale, "dots": False, "size": (300, 220), "panels": panels}
    x_title, y_title = "affinity a (data → task vector)", "share of layers with A ≤ a"
    return lines(sets, grid.tolist(), x_title, y_title, marks=marks, **look)


def _by_rank(content: Content) -> ChartType:
    found = content["affinity_by_rank"]
    names = {"diagonal": "matched: the task's own vector", "off_diagonal": "mismatched: another task's"}
    curves = {title: found[key] for key, title in (names | {"chance": "chance"}).items() if found[key]}
    scales: Any = {"x_scale": alt.Scale(type="log", base=2), "y_scale": alt.Scale(domain=[0, 1])}
    title = "affinity, mean over layers and pairs"
    return lines({"": curves}, found["ranks"], "rank r = r_d = r_v", title, **scales)


def _overlap(content: Content, panels: int) -> ChartType:
    """Draw how far the task vectors overlap, without the overlap of each with itself, which is 1."""
    names = content["names"]
    maps = {
        f"{group} layers": [[value if i != j else None for j, value in enumerate(row)] for i, row in enumerate(matrix)]
        for group, matrix in content["overlap"].items()
    }
    title = f"overlap of the top {content['task_rank']} directions"
    return heat_maps(maps, names, names, ("vector", "vector"), legend=title, panels=panels)


def _energy(content: Content) -> ChartType:
    directions = range(1, 1 + max(map(len, content["energy"].values())))
    options: Any = {"heights": {"90 %": 0.9}, "y_scale": alt.Scale(domain=[0, 1]), "dots": False}
    title = "share of the energy, mean over layers"
    return lines({"": content["energy"]}, directions, "directions", title, **options)


def _effective_ranks(content: Content, table: pd.DataFrame) -> ChartType:
    layers = pd.DataFrame(content["layers"]).set_index("name")
    kinds = list(layers["kind"].unique())
    rows = table.join(layers, on="layer").rename(columns={"kind": "name", "effective_rank": "y"})
    rows["x"] = rows["depth"] + rows["name"].map(lambda kind: aside(kind, kinds))
    x = by_block(int(layers["depth"].max()))
    looks = style(kinds, kinds)
    points = _points(rows, x, alt.Y("y:Q", title="effective rank"), 22, color=looks["color"], shape=looks["shape"])
    return points.properties(width=420, height=320)


def _measured(content: Content) -> dict[str, Json]:
    """Return the methods whose losses are known beyond the first step."""
    return {name: row for name, row in content.get("methods", {}).items() if "fixed" in row}


def _loss_curves(measured: Mapping[str, Json]) -> dict[str, dict[str, list[float | None]]]:
    """Return the losses of each method by step, in a set for each loss and each choice of inputs."""
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
            curves = {name: [value or None for value in curve] for name, curve in curves.items()}  # 0 has no logarithm
        panels.append(lines({title: curves}, steps, "step", y_scale=scale, size=(220, 170), panels=1))
    return alt.concat(*panels, columns=len(_LOSSES))


def _data_free(measured: Mapping[str, Json], table: pd.DataFrame) -> ChartType:
    """Plot the measured losses against the data-free ones: a panel per method, a point per layer and step."""
    charts, axis = [], alt.Axis(grid=False, labelSeparation=10)
    look: Any = {"title": None, "scale": alt.Scale(type="log", nice=False, padding=8), "axis": axis}
    for loss in _BOTH:
        free, panels = f"data_free_{loss}", []
        known = table[(table["step"] > 1) & (table[loss] > 0) & (table[free] > 0)]
        known = known.assign(name=known["method"], x=known[free], y=known[loss])
        for method, row in measured.items():
            rho = row["rank_correlation"][loss]["layers"]
            if len(rows := known[known["method"] == method]):
                panel = _points(rows, alt.X("x:Q", **look), alt.Y("y:Q", **look), 10)
                title = f"{method}: rho {'none' if rho is None else f'{rho:.2f}'}"
                panels.append(panel.properties(title=title, width=170, height=120))
        shared = alt.concat(*panels, columns=5, title=f"measured {loss} loss over the data-free one")
        charts.append(shared.resolve_scale(x="shared", y="shared"))
    return alt.vconcat(*charts)


def _points(rows: pd.DataFrame, x: alt.X, y: alt.Y, size: int, **looks: Any) -> alt.Chart:
    """Draw one point for each row, with its layer and task for hovering."""
    shown: Rows = rows[["name", "x", "y", "layer", "task"]].to_dict("records")
    points = alt.Chart(data(shown)).mark_point(size=size, opacity=0.6, color=COLOURS[0])
    return points.encode(x=x, y=y, tooltip=tooltip(name="", layer="layer", task="task"), **looks)


def _page(content: Content, tables: Tables) -> Page:
    source = content["about"].get("modelpool") or content["about"].get("base", "")
    page = Page(f"{source}: why it merges", f"{len(content['tasks'])} tasks, {len(content['layers'])} layers")
    page.heading("Reading")
    page.bullets(content["reading"])
    if "affinity" in content:
        _affinity_section(page, content, tables)
    if len(content["names"]) > 1:
        page.heading(f"Overlap of the task vectors' top {content['task_rank']} directions")
        page.chart(_overlap(content, 0))
    _vector_section(page, content)
    if measured := _measured(content):
        _loss_section(page, measured)
    if rows := content.get("theorem"):
        page.heading("Theorem 1")
        page.words("For how many pairs of a layer and a task its condition holds, and how high the affinity is.")
        page.table([key.replace("_", " ") for key in rows[0]], [list(row.values()) for row in rows])
    page.configuration({"analysis": content["about"], "versions": content.get("versions", {})})
    return page


def _affinity_section(page: Page, content: Content, tables: Tables) -> None:
    found = content["affinity"]
    page.heading("Affinity of data and task vectors")
    page.chart(_affinity(content, 0))
    if all("dominance" in row for row in found.values()):
        header = ["layers", "matched", "mismatched", "ratio", "rows led", "columns led", "P(matched above)", "chance"]
        keys = ("diagonal", "off_diagonal", "ratio", "rows", "columns", "matched_above")
        rows = [[group, *(row["dominance"][key] for key in keys), row["chance"]] for group, row in found.items()]
        page.table(header, rows)
    if "affinity" in tables and content["pairs"]:
        page.words("The layers' affinities for a high, a moderate and a low pair:")
        page.chart(_distributions(content, tables["affinity"], 0))
    page.words("The affinity over the rank r = r_d = r_v:")
    page.chart(_by_rank(content))


def _vector_section(page: Page, content: Content) -> None:
    page.heading("Task vectors")
    keys = ("relative_norm", "effective_rank", "rank_90", "energy_in_top")
    header = ["task", *keys[:2], "directions for 90 %", f"energy in the top {content['task_rank']}"]
    rows = [[name, *(row[key] for key in keys)] for name, row in content["vectors"].items()]
    page.table([title.replace("_", " ") for title in header], rows)
    page.words("Share of the energy in the first directions, mean over the layers:")
    page.chart(_energy(content))
    if "layers_of" in content:
        page.words("One point is a layer; hover for its name.")
        page.chart(by_depth({title: [by_layer] for title, by_layer in content["layers_of"].items()}))


def _loss_section(page: Page, measured: Mapping[str, Json]) -> None:
    page.heading("Stability and plasticity losses")
    page.words(
        "Lower is better, and a method that changes little has small losses whatever it does for accuracy: read them "
        "beside ACC and BWT. Means over the steps from the second on; fixed inputs are those of each task's own model."
    )
    losses, rows = (*_BOTH, "harmonic", "harmonic_of_means", "arithmetic"), []
    for name, row in measured.items():
        scores = [None if row.get(key) is None else 100 * row[key] for key in ("ACC", "BWT")]
        rho = [row["rank_correlation"][loss]["layers"] for loss in _BOTH]
        rows.append([name, *scores, *(row["fixed"]["mean"][loss] for loss in losses), *rho])
    titles = ["method", "ACC %", "BWT %", *losses, "rho stability", "rho plasticity"]
    page.table([title.replace("_", " ") for title in titles], rows)
    page.words(
        "rho: Spearman's rank correlation, over the layers of a step, of the measured losses with the data-free ones "
        "that the method minimises."
    )
    steps = next(iter(measured.values()))["fixed"]["steps"]
    page.chart(lines(_loss_curves(measured), steps, "step", y_scale=alt.Scale(zero=True)))
