"""The page of an analysis: what it says, affinity, overlaps, losses."""

from pathlib import Path
from typing import Any

import altair as alt

from .charts import by_depth, heat_maps, lines
from .page import Page

Json = dict[str, Any]

_LOSSES = ("stability", "plasticity", "harmonic", "harmonic_of_means", "arithmetic")


def analysis_page(folder: Path, content: Json) -> Page:
    """From ``analysis.json``."""
    about, names = content["about"], content["names"]
    source = about.get("modelpool") or about.get("base", "")
    page = Page(f"{source}: why it merges", f"{len(content['tasks'])} tasks, {len(content['layers'])} layers")
    page.heading("Reading")
    page.bullets(content["reading"])
    if "affinity" in content:
        _affinity(page, content)
    if len(names) > 1:
        page.heading(f"Overlap of the task vectors' top {content['task_rank']} directions")
        # A vector's overlap with itself is 1 and says nothing.
        others = {
            group: [[value if i != j else None for j, value in enumerate(row)] for i, row in enumerate(matrix)]
            for group, matrix in content["overlap"].items()
        }
        page.chart(heat_maps(others, names, names, ("vector", "vector")))
    _vectors(page, content)
    if any("fixed" in row for row in content.get("methods", {}).values()):
        _losses(page, content["methods"])
    if content.get("theorem"):
        page.heading("Theorem 1")
        page.words("In how many pairs of a layer and a task its condition holds, and how high the affinity is.")
        rows = [list(row.values()) for row in content["theorem"]]
        page.table([key.replace("_", " ") for key in content["theorem"][0]], rows)
    page.heading("Configuration")
    page.details("analysis", about)
    page.details("versions", content.get("versions", {}))
    return page


def _affinity(page: Page, content: Json) -> None:
    tasks, found = content["tasks"], content["affinity"]
    page.heading("Affinity of data and task vectors")
    maps = {
        f"{group}, {words}": found[group][key]
        for key, words in (("mean", "mean"), ("p90", "90th percentile"))
        for group in found
    }
    page.chart(heat_maps(maps, tasks, tasks, ("data of", "task vector of")))
    if all("dominance" in row for row in found.values()):
        header = ["layers", "matched", "mismatched", "ratio", "rows led", "columns led", "P(matched above)", "chance"]
        keys = ("diagonal", "off_diagonal", "ratio", "rows", "columns", "matched_above")
        page.table(
            header, [[group, *(row["dominance"][key] for key in keys), row["chance"]] for group, row in found.items()]
        )
    curve = content["affinity_by_rank"]
    curves = {"matched": curve["diagonal"], "mismatched": curve["off_diagonal"], "chance": curve["chance"]}
    page.words("Over the rank r = r_d = r_v:")
    shown = {"affinity": {name: numbers for name, numbers in curves.items() if numbers}}
    page.chart(lines(shown, curve["ranks"], "rank", x_scale=alt.Scale(type="log", base=2)))


def _vectors(page: Page, content: Json) -> None:
    page.heading("Task vectors")
    header = [
        "task",
        "relative norm",
        "effective rank",
        "directions for 90 %",
        f"energy in the top {content['task_rank']}",
    ]
    keys = ("relative_norm", "effective_rank", "rank_90", "energy_in_top")
    page.table(header, [[name, *(row[key] for key in keys)] for name, row in content["vectors"].items()])
    page.words("Share of the energy in the first directions, mean over the layers:")
    length = max(map(len, content["energy"].values()))
    page.chart(lines({"energy": content["energy"]}, range(1, length + 1), "directions"))
    if "layers_of" in content:
        page.words("One point is a layer; hover for its name.")
        page.chart(by_depth({title: [by_layer] for title, by_layer in content["layers_of"].items()}))


def _losses(page: Page, methods: Json) -> None:
    shown = {name: row for name, row in methods.items() if "fixed" in row}
    page.heading("Stability and plasticity losses")
    page.words(
        "Lower is better, and a method that changes little has small losses whatever it does for accuracy: read them "
        "beside ACC and BWT. Means over the steps from the second on; fixed inputs are those of each task's own model."
    )
    header = [
        "method",
        "ACC %",
        "BWT %",
        *(loss.replace("_", " ") for loss in _LOSSES),
        "rho stability",
        "rho plasticity",
    ]
    rows = []
    for name, row in shown.items():
        scores = [None if row.get(key) is None else 100 * row[key] for key in ("ACC", "BWT")]
        rho = [row["rank_correlation"][loss]["layers"] for loss in ("stability", "plasticity")]
        rows.append([name, *scores, *(row["fixed"]["mean"][loss] for loss in _LOSSES), *rho])
    page.table(header, rows)
    page.words(
        "rho: Spearman's rank correlation, over the layers of a step, of the measured losses with the data-free ones "
        "that the method minimises."
    )
    readings = [key for key in ("fixed", "relative", "propagated") if all(key in row for row in shown.values())]
    charts = {
        f"{loss} loss, {reading} inputs": {name: row[reading][loss] for name, row in shown.items()}
        for reading in readings
        for loss in ("stability", "plasticity", "harmonic")
    }
    page.chart(lines(charts, next(iter(shown.values()))["fixed"]["steps"], "step"))
