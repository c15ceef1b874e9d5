"""What the charts of a comparison show, read from the content of ``results.json``."""

import math
from collections.abc import Mapping
from typing import Any

import altair as alt
import numpy as np
from altair.typing import ChartType

from .charts import bars, heat_maps, lines, points
from .comparison_tables import finished
from .matrix import summary
from .metrics import METRICS, AccuracyMatrix, Mean
from .theme import Rows

Json = dict[str, Any]

_MOST_BANDS = 6  # more of them would hide each other


def charts_of(content: Json, *, panels: bool) -> dict[str, ChartType]:
    """Draw all that there are numbers for.

    Args:
        content: of ``results.json``.
        panels: whether sets stand side by side, as in a picture, or are chosen from a menu, as on a page.

    Returns:
        The charts by the names of their pictures.
    """
    done = {label: row for label, row in content["methods"].items() if finished(row)}
    charts: dict[str, ChartType] = {}
    if not done:
        return charts
    if any(row["BWT"]["mean"] is not None for row in done.values()):
        charts["stability_plasticity"] = _stability_plasticity(content, done)
    charts["accuracy_matrices"] = _accuracy_matrices(content, panels)
    if content["settings"].get("evaluate", "").startswith("every_step"):
        charts["accuracy_per_step"] = _accuracy_per_step(content, done)
    if content.get("preset") == "ablation":
        charts["ablation"] = _ablation(content)
    if content.get("preset") == "sensitivity":
        charts["sensitivity"] = _sensitivity(content["panels"], done)
    return charts


def first_seed(content: Json) -> dict[str, AccuracyMatrix]:
    """Return the accuracy matrices of the first seed, whose order all its runs share, in per cent."""
    seed = str(content["seeds"][0])
    runs = {label: finished(row).get(seed) for label, row in content["methods"].items()}
    return {label: AccuracyMatrix.from_rows(run["tasks"], run["accuracy_matrix"]) for label, run in runs.items() if run}


def _accuracy_per_step(content: Json, done: Mapping[str, Json]) -> ChartType:
    """The mean score of the tasks seen so far: mean over the seeds, and a band of one deviation.

    Over several orders, step t is a mean over t tasks that are not the same t tasks in every order.
    """
    means = {}
    for label, row in done.items():
        runs = [AccuracyMatrix.from_rows(run["tasks"], run["accuracy_matrix"]) for run in finished(row).values()]
        means[label] = [Mean.of(column) for column in zip(*(matrix.mean_seen for matrix in runs), strict=True)]
    x: list[Any] = list(range(1, len(content["tasks"]) + 1))
    if len(content["seeds"]) == 1 and len(x) <= 10:  # the order is one
        order = next(iter(finished(next(iter(done.values()))).values()))["tasks"]
        x = [f"{step} + {task}" for step, task in zip(x, order, strict=True)]
    deviations = {label: [100 * mean.std for mean in each] for label, each in means.items()}
    return lines(
        {"": {label: [100 * mean.mean for mean in each] for label, each in means.items()}},
        x,
        "models merged",
        "mean score on the tasks seen so far (%)",
        deviations={"": deviations} if len(done) <= _MOST_BANDS else None,
        heights={
            f"{label}, all tasks": 100 * Mean.of(scores.values()).mean
            for label, scores in content["references"].items()
        },
        among=list(content["methods"]),
        ranked=True,
        size=(620, 380),
    )


def _stability_plasticity(content: Json, done: Mapping[str, Json]) -> ChartType:
    r"""BWT over the mean score of each task right after its own step, with one deviation over the seeds.

    ACC = plasticity + (T-1)/T · BWT for T tasks, so that lines of equal ACC fall from left to right.
    """
    share = (len(content["tasks"]) - 1) / len(content["tasks"])
    series = {}
    for label, row in done.items():
        acc, bwt, plasticity = (Mean.from_json(row[name]) for name in ("ACC", "BWT", "plasticity"))
        if not math.isnan(bwt.mean + plasticity.mean):
            words = {"ACC": acc.percent(), "BWT": bwt.percent(sign=True), "right after its step": plasticity.percent()}
            x, y = (100 * np.array([mean.mean, mean.std]) for mean in (plasticity, bwt))
            series[label] = {"x": x[0], "x_std": x[1], "y": y[0], "y_std": y[1], "words": words}

    def of_equal_acc(x_ends: list[float], y_ends: list[float]) -> Rows:
        (left, right), (bottom, top) = x_ends, y_ends
        lowest, highest = left + share * bottom, min(100, right + share * top)
        distance = max(1, 5 * round((highest - lowest) / 50))
        rows = []
        for acc in range(math.ceil(lowest / distance) * distance, math.floor(highest) + 1, distance):
            x, x2 = max(left, acc - share * top), min(right, acc - share * bottom)
            words = f"ACC {acc}" if x - left > 0.08 * (right - left) else ""  # there is no room for them
            rows.append({"x": x, "y": (acc - x) / share, "x2": x2, "y2": (acc - x2) / share, "words": words})
        return rows

    x_title, y_title = "plasticity: score of each task right after its own step (%)", "stability: BWT (%)"
    return points(series, x_title, y_title, among=list(content["methods"]), background=of_equal_acc)


def _accuracy_matrices(content: Json, panels: bool) -> ChartType:
    """The accuracy matrices of the first seed; other seeds have other orders."""
    matrices = first_seed(content)
    tasks = next(iter(matrices.values())).tasks
    maps = {
        f"{label}\n{summary(matrix)}" if panels else label: (100 * matrix.values).tolist()
        for label, matrix in matrices.items()
    }
    across = min(4, math.ceil(len(maps) ** 0.5)) if panels else 0
    after = [f"+ {task}" for task in tasks]
    return heat_maps(maps, after, tasks, ("after", "task"), domain=(0, 100), legend="score (%)", panels=across)


def _ablation(content: Json) -> ChartType:
    """ACC and BWT with one deviation over the seeds, and the paper's ACC where it is printed."""
    panels: list[ChartType] = []
    for name in ("ACC", "BWT"):
        rows = []
        for label, row in content["methods"].items():
            mean = Mean.from_json(row[name])
            text = mean.percent(sign=METRICS[name].signed) if finished(row) else "failed"
            printed = row["published_percent"].get(name, {}).get("value") if name == "ACC" else None
            numbers = {"value": 100 * mean.mean, "deviation": 100 * mean.std, "printed": printed}
            rows.append({"name": label, "text": text, **numbers})
        panels.append(bars(rows, f"{name} (%)", labels=not panels))
    return alt.hconcat(*panels)


def _sensitivity(panels: list[Json], done: Mapping[str, Json]) -> ChartType:
    """ACC (above) and BWT (below) over what each panel varies; a dashed line marks the method's own value."""
    usual = _config(done["steps 50"]) if "steps 50" in done else {}
    symbols = {panel["key"]: panel["symbol"] for panel in panels}
    rows: dict[str, list[ChartType]] = {"ACC": [], "BWT": []}
    for panel in panels:
        symbol, key = panel["symbol"], panel["key"]
        curve = [row for label, row in done.items() if label.startswith(f"{symbol} ")]
        if not curve:
            continue
        configs = [_config(row) for row in curve]
        values = [str(config[key]) for config in configs]
        title = ", ".join(f"{symbols[name]} = {configs[0][name]}" for name in panel["fixed"])
        own = str(usual.get(key))
        for name, charts in rows.items():
            means = [Mean.from_json(row[name]) for row in curve]
            charts.append(
                lines(
                    {title: {name: [100 * mean.mean for mean in means]}},
                    values,
                    key if key == "max_steps" else f"{key} ({symbol})",
                    "" if charts else f"{name} (%)",
                    deviations={title: {name: [100 * mean.std for mean in means]}},
                    marks={title: (own, "")} if own in values else None,
                    size=(190, 150),
                    panels=1,
                )
            )
    return alt.vconcat(*(alt.hconcat(*charts).resolve_scale(y="shared") for charts in rows.values()))


def _config(row: Json) -> Json:
    """The settings of a method, from any of its runs that did not fail."""
    return dict(next(iter(finished(row).values()))["config"])
