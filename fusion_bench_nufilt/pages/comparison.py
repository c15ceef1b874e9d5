"""The tables, pictures and page of a comparison, made from ``results.json``."""

import math
from collections.abc import Mapping, Sequence

import altair as alt
from altair.typing import ChartType

from .charts import bars_by_step, lines, score_maps
from .comparison_tables import main_table, method_numbers, overhead_tables, task_numbers, task_table
from .content import ComparisonContent, Method
from .metrics import METRICS, AccuracyMatrix, Mean
from .page import Outputs, Tables, render_page
from .tables import print_table, to_csv
from .theme import COLOURS, Options, Rows, by_name, layered, tooltip

PICTURES = {
    "ablation",
    "sensitivity",
    "stability_plasticity",
    "accuracy_per_step",
    "accuracy_matrices",
}
_MOST_CURVES = 5  # a picture has those of the best methods; a page has all
_TITLES = {"plasticity": "each task right after its step"}
_MOST_BANDS = 6  # more would hide each other


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
    charts: dict[str, ChartType | None] = {**charts_of(results, panels=True)}
    return Outputs(_page(results), charts | dict.fromkeys(PICTURES - charts.keys()), texts)


def print_comparison(results: ComparisonContent) -> None:
    """Print the tables, that of the tasks only if it fits, since it is in ``per_task.md``, too."""
    print_table(task_table(results).as_rich(), if_it_fits=True)
    main = main_table(results)
    for table in (main, *overhead_tables(results)):
        print_table(table.as_rich())
    print("\n".join(main.notes))


def _page(results: ComparisonContent) -> str:
    charts = charts_of(results, panels=False)
    if matrices := results.first_seed:
        scores = {label: matrix.percents for label, matrix in matrices.items()}
        charts["bars"] = bars_by_step(scores, next(iter(matrices.values())).tasks)
    tables = [task_table(results), *overhead_tables(results)]
    overrides = {label: method.overrides for label, method in results.methods.items()}
    context = {"results": results, "charts": charts, "main": main_table(results), "tables": tables}
    return render_page("comparison.html", **context, overrides=overrides)


def charts_of(results: ComparisonContent, *, panels: bool) -> dict[str, ChartType]:
    """Return each chart for which there are numbers, by its name, with ``panels`` for pictures or
    menus for a page.
    """
    charts: dict[str, ChartType] = {}
    best = dict(sorted(results.done.items(), key=lambda row: -row[1].mean("ACC").mean))
    if not best:
        return charts
    if any(method.mean("BWT").count for method in best.values()):
        charts["stability_plasticity"] = _dots(best, "ACC", "plasticity", "BWT")
    if results.first_seed:
        charts["accuracy_matrices"] = _accuracy_matrices(results.first_seed, panels)
    if results.settings.get("evaluate", "").startswith("every_step"):
        charts["accuracy_per_step"] = _accuracy_per_step(
            results, list(best)[: _MOST_CURVES if panels else None]
        )
    if results.preset == "ablation":
        charts["ablation"] = _dots(results.methods, "ACC", "BWT")
    if results.preset in ("sensitivity", "ranks"):
        charts["sensitivity"] = _sensitivity(results)
    return charts


def _accuracy_per_step(results: ComparisonContent, labels: Sequence[str]) -> ChartType:
    """Draw the mean over the seeds, whose tasks differ from step to step, in a band of one standard
    deviation.
    """
    means, deviations = {}, {}
    for label in labels:
        matrices = list(results.methods[label].matrices.values())
        steps = [
            Mean.of(scores)
            for scores in zip(*(matrix.mean_seen for matrix in matrices), strict=True)
        ]
        means[label] = [100 * step.mean for step in steps]
        deviations[label] = [100 * step.std for step in steps]
    named = len(results.seeds) == 1 and len(steps) <= 10
    return lines(
        {"": means},
        matrices[0].steps if named else range(1, len(steps) + 1),
        "models merged",
        "mean score on the tasks seen so far (%)",
        deviations={"": deviations} if len(means) <= _MOST_BANDS else None,
        heights={
            "individual models, all tasks": 100
            * Mean.of(results.references["individual"].values()).mean
        },
        among=list(results.methods),
        ranked=True,
        size=(460, 320),  # with its legend below, it can be read on a phone
        orient="bottom",
        columns=3,
    )


def _accuracy_matrices(matrices: Mapping[str, AccuracyMatrix], panels: bool) -> ChartType:
    maps = {
        f"{label}\n{matrix.summary()}" if panels else label: matrix.percents
        for label, matrix in matrices.items()
    }
    tasks = next(iter(matrices.values())).tasks
    across = min(4, math.ceil(len(maps) ** 0.5)) if panels else 0
    return score_maps(maps, [f"+ {task}" for task in tasks], tasks, across)


def _dots(methods: Mapping[str, Method], *names: str) -> ChartType:
    """Draw metrics side by side, with a row for each method: its mean and one standard deviation
    over the seeds.
    """
    return alt.hconcat(*(_dot_panel(methods, name, labelled=name == names[0]) for name in names))


def _dot_panel(methods: Mapping[str, Method], name: str, *, labelled: bool) -> alt.LayerChart:
    """Draw one metric; a diamond marks the ACC that the paper prints."""
    rows: Rows = []
    for label, method in methods.items():
        mean, paper = method.mean(name), method.published_percent.get(name, {}).get("value")
        text = method.words(mean, sign=METRICS[name].signed)
        low, high = 100 * (mean.mean - mean.std), 100 * (mean.mean + mean.std)
        row = {"name": label, "text": text, "value": 100 * mean.mean, "low": low, "high": high}
        rows.append(row | {"paper": paper if name == "ACC" else None})
    title = f"{_TITLES.get(name, name)} (%)"
    y = alt.Y("name:N", **by_name(list(methods), None, shown=labelled))
    base = alt.Chart().encode(y=y, tooltip=tooltip(name="", text=title))
    x: Options = {"title": title, "scale": alt.Scale(zero=False, padding=10)}
    bars = base.transform_filter("isValid(datum.low)").mark_rule(size=1.5, color=COLOURS[-1])
    layers = [
        bars.encode(x=alt.X("low:Q", **x), x2="high:Q"),
        base.mark_point(color=COLOURS[0], size=70).encode(x=alt.X("value:Q", **x)),
        base.mark_text(align="left", fontSize=11, color=COLOURS[-1]).encode(
            x=alt.value(212), text="text:N"
        ),
    ]
    if any(row["paper"] is not None for row in rows):
        printed = base.transform_filter("isValid(datum.paper)").transform_calculate(what="'paper'")
        colour = alt.Color(
            "what:N", scale=alt.Scale(domain=["paper"], range=[COLOURS[1]]), title=None
        )
        layers.append(
            printed.mark_point(shape="diamond", size=90).encode(x=alt.X("paper:Q"), color=colour)
        )
    return layered(layers, rows, (200, 22 * len(rows)))


def _sensitivity(results: ComparisonContent) -> ChartType:
    """Draw ACC (above) and BWT (below) over what each panel varies; a dashed line marks the
    method's own value.
    """
    panels = results.panels or []
    symbols = {panel["key"]: panel["symbol"] for panel in panels}
    own = results.done["steps 50"].config if "steps 50" in results.done else {}
    charts: dict[str, list[ChartType]] = {"ACC": [], "BWT": []}
    for panel in panels:
        key, curve = panel["key"], list(results.curves[panel["symbol"]].values())
        if not curve:
            continue
        values, mark = [str(method.config[key]) for method in curve], str(own.get(key))
        title = ", ".join(f"{symbols[name]} = {curve[0].config[name]}" for name in panel["fixed"])
        for name, row in charts.items():
            means = [method.mean(name) for method in curve]
            chart = lines(
                {title: {name: [100 * mean.mean for mean in means]}},
                values,
                key if key == "max_steps" else f"{key} ({panel['symbol']})",
                "" if row else f"{name} (%)",
                deviations={title: {name: [100 * mean.std for mean in means]}},
                marks={title: (mark, "")} if mark in values else None,
                size=(190, 150),
                panels=1,
            )
            row.append(chart)
    panes = (alt.hconcat(*row).resolve_scale(y="shared") for row in charts.values())
    return alt.vconcat(*panes, title=f"scored on {results.scored}")
