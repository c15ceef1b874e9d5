"""What a comparison leaves beside ``results.json``: tables, pictures and a page."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired

import altair as alt
import numpy as np
from altair.typing import ChartType
from typing_extensions import TypedDict

from fusion_bench_nufilt.storage.files import write_text
from fusion_bench_nufilt.storage.json_files import read_json

from .charts import bars, bars_by_step, heat_maps, lines, points
from .comparison_tables import finished, main_table, method_numbers, overhead_tables, task_numbers, task_table
from .metrics import METRICS, AccuracyMatrix, Mean
from .page import PAGE, Page
from .tables import fits_terminal, print_table
from .theme import Rows, save_chart

Json = dict[str, Any]
MeanJson = dict[str, float | None]
RESULTS = "results.json"
#: The pictures of a comparison, and what they show on its page.
PICTURES = {
    "ablation": "Ablation",
    "sensitivity": "Sensitivity",
    "stability_plasticity": "Stability against plasticity",
    "accuracy_per_step": "Mean score of the tasks seen so far",
    "accuracy_matrices": "Scores after each step (%), seed {seed}",
}
_MOST_BANDS = 6  # more of them would hide each other


class _Method(TypedDict):
    overrides: list[str]
    ACC: MeanJson
    BWT: MeanJson
    plasticity: MeanJson
    merging_seconds: MeanJson
    final: dict[str, MeanJson]
    published_percent: dict[str, Json]
    runs: dict[str, Json]


class Results(TypedDict):
    """What ``results.json`` holds of a comparison."""

    settings: Json
    environment: dict[str, str]
    preset: NotRequired[str | None]
    tasks: list[str]
    seeds: list[int]
    references: dict[str, dict[str, float | None]]
    methods: dict[str, _Method]


def read_results(folder: Path) -> Json:
    """Read ``results.json``.

    Raises:
        ValueError: the file is not there or is damaged; names it, and the field.
    """
    content: Any = read_json(folder / RESULTS, Results, advice="run the comparison again")
    if content is None:
        raise ValueError(f"'{folder}' has no {RESULTS}")
    return dict(content)


def write_comparison(folder: Path) -> list[str]:
    """Write tables, pictures and the page, each whole or not at all, and return the names of the files.

    A picture that would say nothing is left out. Scores are fractions in ``.json`` and ``.csv``, elsewhere per cent.
    """
    content = read_results(folder)
    texts = {}
    for name, table, numbers in (
        ("table", main_table(content), method_numbers(content)),
        ("per_task", task_table(content), task_numbers(content)),
    ):
        texts[f"{name}.md"] = table.as_markdown()
        texts[f"{name}.tex"] = table.as_latex()
        texts[f"{name}.csv"] = numbers.to_csv(index=False, lineterminator="\n")
    if costs := overhead_tables(content):
        texts["overhead.md"] = "\n".join(table.as_markdown() for table in costs)
        texts["overhead.tex"] = "".join(table.as_latex() for table in costs)
    for name, text in texts.items():
        write_text(folder / name, text)
    wanted = charts_of(content, panels=True)
    for name in PICTURES:
        picture = folder / f"{name}.png"
        if name in wanted:
            save_chart(wanted[name], picture)
        elif "preset" in content:  # a picture of another comparison; older files do not say which preset they are of
            picture.unlink(missing_ok=True)
    write_text(folder / PAGE, _page(content).render())
    return [*texts, *(f"{name}.png" for name in wanted), PAGE]


def print_comparison(folder: Path) -> None:
    """Print the tables to the terminal: that of the tasks if it fits, and below it the main one with its notes."""
    content = read_results(folder)
    if fits_terminal(per_task := task_table(content).as_rich()):  # else it is in per_task.md
        print_table(per_task)
    main = main_table(content)
    for table in (main, *overhead_tables(content)):
        print_table(table.as_rich())
    print("\n".join(main.notes))


def _page(content: Json) -> Page:
    tasks, seeds = content["tasks"], content["seeds"]
    orders = "one task order" if len(seeds) == 1 else f"{len(seeds)} task orders"
    page = Page(
        f"{content['settings']['modelpool']}: {len(content['methods'])} methods",
        f"{len(tasks)} models merged one after another, {orders} ({', '.join(map(str, seeds))})",
    )
    page.texts(main_table(content))
    charts = charts_of(content, panels=False)
    for name, title in PICTURES.items():
        if name in charts:
            page.heading(title.format(seed=seeds[0]))
            page.chart(charts[name])
    if matrices := _first_seed(content):
        page.words("Side by side, after the step that the slider chooses:")
        scores = {label: (100 * matrix.values).tolist() for label, matrix in matrices.items()}
        page.chart(bars_by_step(scores, next(iter(matrices.values())).tasks))
    for table in (task_table(content), *overhead_tables(content)):
        page.texts(table)
    overrides = {label: row["overrides"] for label, row in content["methods"].items()}
    page.configuration({"settings": content["settings"], "methods": overrides, "versions": content["environment"]})
    return page


def charts_of(content: Json, *, panels: bool) -> dict[str, ChartType]:
    """Draw all that ``results.json`` has numbers for, and return the charts by the names of their pictures.

    With ``panels``, sets stand side by side, as in a picture; without, a menu chooses one, as on a page.
    """
    done = {label: row for label, row in content["methods"].items() if finished(row)}
    charts: dict[str, ChartType] = {}
    if not done:
        return charts
    if any(row["BWT"]["mean"] is not None for row in done.values()):
        charts["stability_plasticity"] = _stability_plasticity(content, done)
    if matrices := _first_seed(content):
        charts["accuracy_matrices"] = _accuracy_matrices(matrices, panels)
    if content["settings"].get("evaluate", "").startswith("every_step"):
        charts["accuracy_per_step"] = _accuracy_per_step(content, done)
    if content.get("preset") == "ablation":
        charts["ablation"] = alt.hconcat(*(_ablation(content, name) for name in ("ACC", "BWT")))
    if content.get("preset") == "sensitivity":
        charts["sensitivity"] = _sensitivity(content["panels"], done)
    return charts


def _matrices(row: Json) -> dict[str, AccuracyMatrix]:
    """The accuracy matrices of a method by seed, of the runs that did not fail."""
    runs = finished(row).items()
    return {seed: AccuracyMatrix.from_rows(run["tasks"], run["accuracy_matrix"]) for seed, run in runs}


def _first_seed(content: Json) -> dict[str, AccuracyMatrix]:
    """The accuracy matrices of the first seed, whose order all its runs share."""
    seed = str(content["seeds"][0])
    by_seed = {label: _matrices(row) for label, row in content["methods"].items()}
    return {label: matrices[seed] for label, matrices in by_seed.items() if seed in matrices}


def _accuracy_per_step(content: Json, done: Mapping[str, Json]) -> ChartType:
    """The mean score of the tasks seen so far: mean over the seeds, and a band of one deviation.

    Over several orders, step t is a mean over t tasks that are not the same t tasks in every order.
    """
    means, deviations, references = {}, {}, content["references"].items()
    for label, row in done.items():
        matrices = list(_matrices(row).values())
        steps = [Mean.of(scores) for scores in zip(*(matrix.mean_seen for matrix in matrices), strict=True)]
        means[label] = [100 * mean.mean for mean in steps]
        deviations[label] = [100 * mean.std for mean in steps]
    one_order = len(content["seeds"]) == 1 and len(steps) <= 10
    return lines(
        {"": means},
        matrices[0].steps if one_order else range(1, len(steps) + 1),
        "models merged",
        "mean score on the tasks seen so far (%)",
        deviations={"": deviations} if len(done) <= _MOST_BANDS else None,
        heights={f"{label}, all tasks": 100 * Mean.of(scores.values()).mean for label, scores in references},
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


def _accuracy_matrices(matrices: Mapping[str, AccuracyMatrix], panels: bool) -> ChartType:
    tasks = next(iter(matrices.values())).tasks
    maps = {
        f"{label}\n{matrix.summary()}" if panels else label: (100 * matrix.values).tolist()
        for label, matrix in matrices.items()
    }
    across = min(4, math.ceil(len(maps) ** 0.5)) if panels else 0
    after = [f"+ {task}" for task in tasks]
    return heat_maps(maps, after, tasks, ("after", "task"), domain=(0, 100), legend="score (%)", panels=across)


def _ablation(content: Json, name: str) -> ChartType:
    """A metric with one deviation over the seeds, and the paper's ACC where it is printed."""
    rows = []
    for label, row in content["methods"].items():
        mean = Mean.from_json(row[name])
        text = mean.percent(sign=METRICS[name].signed) if finished(row) else "failed"
        printed = row["published_percent"].get(name, {}).get("value") if name == "ACC" else None
        numbers = {"value": 100 * mean.mean, "deviation": 100 * mean.std, "printed": printed}
        rows.append({"name": label, "text": text, **numbers})
    return bars(rows, f"{name} (%)", labels=name == "ACC")


def _sensitivity(panels: list[Json], done: Mapping[str, Json]) -> ChartType:
    """ACC (above) and BWT (below) over what each panel varies; a dashed line marks the method's own value."""
    configs = {label: next(iter(finished(row).values()))["config"] for label, row in done.items()}  # of any run
    symbols = {panel["key"]: panel["symbol"] for panel in panels}
    rows: dict[str, list[ChartType]] = {"ACC": [], "BWT": []}
    for panel in panels:
        symbol, key = panel["symbol"], panel["key"]
        curve = [label for label in done if label.startswith(f"{symbol} ")]
        if not curve:
            continue
        values = [str(configs[label][key]) for label in curve]
        title = ", ".join(f"{symbols[name]} = {configs[curve[0]][name]}" for name in panel["fixed"])
        own = str(configs.get("steps 50", {}).get(key))
        for name, charts in rows.items():
            means = [Mean.from_json(done[label][name]) for label in curve]
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
