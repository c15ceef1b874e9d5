"""The tables, pictures and page of a comparison, made from ``results.json``."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
from altair.typing import ChartType

from .charts import bars, dots, lines, score_maps
from .comparison_tables import main_table, method_numbers, overhead_tables, task_numbers, task_table
from .content import ComparisonContent, Json, Method
from .metrics import METRICS, AccuracyMatrix, Mean
from .page import Outputs, Tables, render_page
from .tables import print_table, to_csv
from .theme import COLOURS, Rows, cells

PICTURES = (
    "ablation",
    "sensitivity",
    "stability_plasticity",
    "accuracy_matrices",
    "accuracy_per_step",
)
#: The methods of one chart of curves: as many as there are colours.
MOST_CURVES = len(COLOURS)
_MOST_BANDS = 6  # more would hide each other
_TITLES = {"plasticity": "each task right after its step (%)"}


def comparison_outputs(results: ComparisonContent, _: Tables) -> Outputs:
    """Make all files; scores are fractions in ``.json`` and ``.csv`` files, and per cent
    elsewhere.
    """
    texts = {
        "table.csv": to_csv(method_numbers(results)),
        "per_task.csv": to_csv(task_numbers(results)),
    }
    found = {
        "table": [main_table(results)],
        "per_task": [task_table(results)],
        "overhead": overhead_tables(results),
    }
    for name, tables in found.items():
        if tables:
            texts[f"{name}.md"] = "\n".join(table.as_markdown() for table in tables)
            texts[f"{name}.tex"] = "".join(table.as_latex() for table in tables)
    charts = charts_of(results)
    pictures: dict[str, ChartType | None] = {name: charts.get(name) for name in PICTURES}
    return Outputs(_page(results, charts), pictures, texts)


def print_comparison(results: ComparisonContent) -> None:
    """Print the tables, that of the tasks only if it fits, since it is in ``per_task.md``, too."""
    print_table(task_table(results).as_rich(), if_it_fits=True)
    main = main_table(results)
    for table in (main, *overhead_tables(results)):
        print_table(table.as_rich())
    print("\n".join(main.notes))


def _page(results: ComparisonContent, charts: Mapping[str, ChartType]) -> str:
    return render_page(
        "comparison.html",
        results=results,
        charts=charts,
        most_curves=MOST_CURVES,
        main=main_table(results),
        tables=[task_table(results), *overhead_tables(results)],
        overrides={label: method.overrides for label, method in results.methods.items()},
    )


def charts_of(results: ComparisonContent) -> dict[str, ChartType]:
    """Return each chart for which there are numbers, by its name."""
    charts: dict[str, ChartType] = {}
    best = dict(sorted(results.done.items(), key=lambda row: -row[1].mean("ACC").mean))
    if not best:
        return charts
    if any(method.mean("BWT").count for method in best.values()):
        charts["stability_plasticity"] = dots(_metrics(best, ["ACC", "plasticity", "BWT"]))
    if results.first_seed:
        charts["accuracy_matrices"] = _accuracy_matrices(results.first_seed)
    task_scores = _task_scores(results)
    if task_scores:
        charts["task_scores"] = bars(task_scores)
    if results.settings.get("evaluate", "").startswith("every_step"):
        charts["accuracy_per_step"] = _accuracy_per_step(results, list(best)[:MOST_CURVES])
    if results.preset == "ablation":
        charts["ablation"] = dots(_metrics(results.methods, ["ACC", "BWT"]))
    if results.preset in ("sensitivity", "ranks") and any(results.curves.values()):
        charts["sensitivity"] = _sensitivity(results)
    return charts


def _accuracy_per_step(results: ComparisonContent, labels: Sequence[str]) -> ChartType:
    """Draw the mean over the seeds, whose tasks differ from step to step, in a band of one standard
    deviation.
    """
    rows: Rows = []
    for label in labels:
        matrices = list(results.methods[label].matrices.values())
        steps: Sequence[int | str] = range(1, len(results.tasks) + 1)
        if len(results.seeds) == 1 and len(results.tasks) <= 10:
            steps = matrices[0].steps
        seen = zip(*(matrix.mean_seen for matrix in matrices), strict=True)
        for step, scores in zip(steps, seen, strict=True):
            mean = Mean.of(scores)
            row: Json = {"name": label, "x": step, "y": 100 * mean.mean}
            if len(labels) <= _MOST_BANDS and mean.count > 1:
                row |= {"low": 100 * (mean.mean - mean.std), "high": 100 * (mean.mean + mean.std)}
            rows.append(row)
    individual = Mean.of(results.references["individual"].values()).mean
    rows.append({"level": 100 * individual, "words": "individual models, all tasks"})
    return lines(
        rows,
        "models merged",
        "mean score on the tasks seen so far (%)",
        among=list(results.methods),
        ranked=True,
        size=(460, 320),  # with its legend below, it can be read on a phone
        orient="bottom",
        columns=3,
    )


def _accuracy_matrices(matrices: Mapping[str, AccuracyMatrix]) -> ChartType:
    tasks = next(iter(matrices.values())).tasks
    steps = [f"+ {task}" for task in tasks]
    rows: Rows = []
    for label, matrix in matrices.items():
        rows += cells(matrix.percents, steps, tasks, f"{label}: {matrix.summary()}")
    return score_maps(rows, steps, tasks)


def _task_scores(results: ComparisonContent) -> Rows:
    """Return the final score of each method on each task, mean over the seeds."""
    rows: Rows = []
    for task in results.tasks:
        for label, method in results.done.items():
            mean = method.final(task)
            if mean.count:
                value = 100 * mean.mean
                rows.append({"panel": task, "name": label, "value": value, "text": f"{value:.1f}"})
    return rows


def _metrics(methods: Mapping[str, Method], names: Sequence[str]) -> Rows:
    """Return the mean and one standard deviation over the seeds of metrics that some method has,
    and the ACC that the paper prints.
    """
    rows: Rows = []
    for name in names:
        means = {label: method.mean(name) for label, method in methods.items()}
        if not any(mean.count for mean in means.values()):
            continue
        for label, mean in means.items():
            row: Json = {"panel": _TITLES.get(name, f"{name} (%)"), "name": label}
            row["text"] = methods[label].words(mean, sign=METRICS[name].signed)
            row["value"] = 100 * mean.mean
            row |= {"low": 100 * (mean.mean - mean.std), "high": 100 * (mean.mean + mean.std)}
            if name == "ACC":
                row["paper"] = methods[label].published_percent.get(name, {}).get("value")
            rows.append(row)
    return rows


def _sensitivity(results: ComparisonContent) -> ChartType:
    """Draw ACC (above) and BWT (below) over what each panel varies; a dashed line marks the
    method's own value.
    """
    own = results.done["steps 50"].config if "steps 50" in results.done else {}
    charts = []
    for name in ("ACC", "BWT"):
        rows: Rows = []
        for panel in results.panels or ():
            curve = list(results.curves[panel["symbol"]].values())
            key = panel["key"]
            values = []
            for method in curve:
                mean = method.mean(name)
                if not mean.count:
                    continue
                row: Json = {"panel": _panel_title(results, panel, method), "name": "mean"}
                row |= {"x": str(method.config[key]), "y": 100 * mean.mean}
                if mean.count > 1:
                    row["low"] = 100 * (mean.mean - mean.std)
                    row["high"] = 100 * (mean.mean + mean.std)
                values.append(row)
            rows += values
            marked = [row for row in values if row["x"] == str(own.get(key))]
            for row in marked:
                rows.append({"panel": row["panel"], "x": row["x"], "mark": True, "words": ""})
        if rows:
            look: Any = {"size": (240, 150), "own_scales": ["x"]}
            charts.append(lines(rows, "value of the option", f"{name} (%)", **look))
    return alt.vconcat(*charts, title=f"scored on {results.scored}")


def _panel_title(results: ComparisonContent, panel: Json, method: Method) -> str:
    """Return such as ``lora_rank = r_l, with r_p = 128, r_v = 8``, for one of a panel's methods."""
    symbols = {each["key"]: each["symbol"] for each in results.panels or ()}
    key = panel["key"]
    varied = key if symbols[key] == "steps" else f"{key} = {symbols[key]}"
    fixed = ", ".join(f"{symbols[other]} = {method.config[other]}" for other in panel["fixed"])
    return f"{varied}, with {fixed}"
