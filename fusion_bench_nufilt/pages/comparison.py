"""The tables, pictures and page of a comparison, made from ``results.json``."""

from collections.abc import Sequence

import altair as alt
from altair.typing import ChartType

from .charts import dots, lines, score_maps
from .comparison_tables import by_accuracy, main_table, mean_words, task_table
from .content import Comparison, Json, Method
from .metrics import METRICS, Mean
from .page import Layers, Outputs, render_page
from .pictures import draw
from .results import means, rows_with
from .tables import print_table, to_csv
from .theme import COLOURS, Rows, value_scale

PICTURES = ("sensitivity", "stability_plasticity", "accuracy_matrices", "accuracy_per_step")
#: The methods of one chart of curves: as many as there are colours.
MOST_CURVES = len(COLOURS)


def comparison_outputs(results: Comparison, _: Layers) -> Outputs:
    """Make all files; scores are fractions in ``.json`` and ``.csv`` files, and per cent
    elsewhere.
    """
    # The methods of a comparison measure no layers.
    texts = {"results.csv": to_csv(results.table.drop(columns="layer"))}
    main = main_table(results)
    tasks = task_table(results)
    for name, table in {"table": main, "per_task": tasks}.items():
        texts[f"{name}.md"] = table.as_markdown()
        texts[f"{name}.tex"] = table.as_latex()
    charts = charts_of_comparison(results)
    drawings = {name: draw(chart) for name, chart in charts.items()}
    # None removes a picture that an earlier comparison in the folder has left.
    pictures = {name: drawings.get(name) for name in PICTURES}
    page = render_page(
        "comparison.html",
        results=results,
        charts=drawings,
        main=main,
        tasks=tasks,
        overrides={label: method.overrides for label, method in results.methods.items()},
        forgetting=len(rows_with(results.table, metric="BWT")) > 0,
    )
    return Outputs(page, pictures, texts)


def print_comparison(results: Comparison) -> None:
    """Print the tables, that of the tasks only if it fits, since it is in ``per_task.md``, too."""
    print_table(task_table(results).as_rich(), if_it_fits=True)
    main = main_table(results)
    print_table(main.as_rich())
    print("\n".join(main.notes))


def charts_of_comparison(results: Comparison) -> dict[str, ChartType]:
    """Return each chart for which there are numbers, by its name."""
    charts: dict[str, ChartType] = {}
    if not results.done:
        return charts
    measured = results.table
    best = by_accuracy(results, list(results.done))
    shown = ["ACC"]
    # Of one task, or with the last step scored alone, nothing is known of what is forgotten.
    if len(rows_with(measured, metric="BWT")):
        shown = ["ACC", "plasticity", "BWT"]
    charts["stability_plasticity"] = dots(_mean_rows(results, best, shown))
    matrices = results.matrices(results.seeds[0])
    if matrices:
        titles = {f"{label}: {matrix.summary()}": matrix for label, matrix in matrices.items()}
        charts["accuracy_matrices"] = score_maps(titles)
    # With other settings, the mean over the tasks seen so far is known at most for the ends.
    every_step = results.settings.get("evaluate", "").startswith("every_step")
    if every_step and len(results.tasks) > 1:
        charts["accuracy_per_step"] = _accuracy_per_step(results, best[:MOST_CURVES])
    if any(results.curve(panel) for panel in results.panels or ()):
        charts["sensitivity"] = _sensitivity(results)
    return charts


def _accuracy_per_step(results: Comparison, labels: Sequence[str]) -> ChartType:
    """Draw the mean over the seeds, whose tasks differ from step to step, with one standard
    deviation.
    """
    steps = list(range(1, len(results.tasks) + 1))
    step_names: Sequence[int | str] = steps
    # On another seed, the same step merges another task; more than ten names have no room.
    if len(results.seeds) == 1 and len(results.tasks) <= 10:
        step_names = results.matrices(results.seeds[0])[labels[0]].steps
    seen = means(rows_with(results.table, metric="seen"), "step", labels, steps)
    accuracy = means(results.table, "metric", list(results.methods), ["ACC"])["ACC"]
    curve_names = {}
    for label, mean in accuracy.items():
        # A mean over fewer tasks is not to be read as one beside those over all.
        part = results.missing_part(label, mean, "ACC")
        curve_names[label] = f"{label} ({part})" if part else label
    rows: Rows = []
    for label in labels:
        for step, mean in zip(step_names, seen.loc[label], strict=True):
            row: Json = {"name": curve_names[label], "x": step, "y": 100 * mean.mean}
            rows.append(row | _bar(mean, "ACC"))
    individual = means(results.table, "metric", ["individual"], ["ACC"]).loc["individual", "ACC"]
    rows.append({"level": 100 * individual.mean, "words": "individual models, all tasks"})
    title = "mean score on the tasks seen so far (%)"
    if any("low" in row for row in rows):
        title += " ± one std"
    chart = lines(rows, "models merged", title, among=list(curve_names.values()))
    if len(labels) < len(results.done):
        # In the picture itself, since it is shown by itself as well.
        which = f"the {len(labels)} of {len(results.done)} methods with the highest ACC"
        chart = chart.properties(title=which)
    return chart


def _bar(mean: Mean, metric: str) -> Json:
    """Return the ends of a bar of one standard deviation around the mean of a metric, in per cent,
    within what there can be; of a single number there is none.
    """
    if mean.count < 2:
        return {}
    lowest = -100 if METRICS[metric].signed else 0
    low = 100 * (mean.mean - mean.std)
    high = 100 * (mean.mean + mean.std)
    # A score may be below zero, as a correlation is, and lies on its bar all the same.
    return {"low": max(low, min(lowest, 100 * mean.mean)), "high": min(high, 100)}


def _mean_rows(results: Comparison, labels: Sequence[str], metrics: Sequence[str]) -> Rows:
    """Return the mean and one standard deviation over the seeds of metrics that some method has."""
    measured = means(results.table, "metric", labels, metrics)
    rows: Rows = []
    for metric in metrics:
        if not any(mean.count for mean in measured[metric]):
            continue
        for label, mean in measured[metric].items():
            row: Json = {"panel": METRICS[metric].title, "name": label}
            row["text"] = mean_words(results, label, mean, metric)
            rows.append({**row, "value": 100 * mean.mean, **_bar(mean, metric)})
    return rows


def _sensitivity(results: Comparison) -> ChartType:
    """Draw ACC (above) and BWT (below) over what each panel varies."""
    numbers = means(results.table, "metric", list(results.done), ["ACC", "BWT"])
    charts = []
    for name in ("ACC", "BWT"):
        rows: Rows = []
        for panel in results.panels or ():
            for label, method in results.curve(panel).items():
                mean = numbers.loc[label, name]
                if not mean.count:
                    continue
                row: Json = {"panel": _panel_title(results, panel, method), "name": "mean"}
                # Words stand at equal distances, which values such as 8, 16 and 128 would not.
                row |= {"x": str(method.config[panel["key"]]), "y": 100 * mean.mean}
                rows.append(row | _bar(mean, name))
        if rows:
            ends = [row[key] for row in rows for key in ("y", "low", "high") if key in row]
            y_scale = value_scale(ends, 18)  # one for all panels
            title = METRICS[name].title
            charts.append(lines(rows, "value of the option", title, y_scale=y_scale))
    return alt.vconcat(*charts, title=f"scored on {results.scored}")


def _panel_title(results: Comparison, panel: Json, method: Method) -> str:
    """Return such as ``lora_rank = r_l, with r_p = 128, r_v = 8``, for one of a panel's methods."""
    symbols = {other["key"]: other["symbol"] for other in results.panels or ()}
    key = panel["key"]
    varied = key
    if key != "max_steps":
        varied = f"{key} = {symbols[key]}"
    fixed = ", ".join(f"{symbols[option]} = {method.config[option]}" for option in panel["fixed"])
    return f"{varied}, with {fixed}"
