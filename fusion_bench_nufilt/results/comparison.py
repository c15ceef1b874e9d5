"""What a comparison leaves beside ``results.json``: tables, pictures and a page."""

from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from fusion_bench_nufilt.storage.files import write_text
from fusion_bench_nufilt.storage.json_files import read_json

from .charts import bars_by_step
from .comparison_charts import charts_of, first_seed
from .comparison_tables import main_table, method_numbers, overhead_tables, task_numbers, task_table
from .matrix import fits_terminal, print_table
from .page import PAGE, Page
from .theme import save_chart

Json = dict[str, Any]
RESULTS = "results.json"
#: The pictures of a comparison, and what they show on its page.
PICTURES = {
    "ablation": "Ablation",
    "sensitivity": "Sensitivity",
    "stability_plasticity": "Stability against plasticity",
    "accuracy_per_step": "Mean score of the tasks seen so far",
    "accuracy_matrices": "Scores after each step (%), seed {seed}",
}


class _Mean(TypedDict):
    mean: float | None
    std: float | None
    count: int


class _Run(TypedDict):
    config: Json
    tasks: list[str] | None
    accuracy_matrix: list[list[float | None]] | None
    error: str | None


class _Method(TypedDict):
    overrides: list[str]
    ACC: _Mean
    BWT: _Mean
    plasticity: _Mean
    merging_seconds: _Mean
    final: dict[str, _Mean]
    published_percent: dict[str, Json]
    runs: dict[str, _Run]


class _Settings(TypedDict):
    modelpool: str
    overrides: NotRequired[list[str]]


class Results(TypedDict):
    """What ``results.json`` holds of a comparison."""

    settings: _Settings
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
    """Write tables, pictures and the page, each whole or not at all; a picture that would say nothing is left out.

    Scores are per cent in ``.md``, ``.tex``, pictures and page, fractions in ``.json`` and ``.csv``.

    Returns:
        The names of the files.
    """
    content = read_results(folder)
    table, tasks = main_table(content), task_table(content)
    texts = {
        "table.md": table.as_markdown(),
        "table.tex": table.as_latex(),
        "table.csv": method_numbers(content).to_csv(index=False, lineterminator="\n"),
        "per_task.md": tasks.as_markdown(),
        "per_task.tex": tasks.as_latex(),
        "per_task.csv": task_numbers(content).to_csv(index=False, lineterminator="\n"),
    }
    if content.get("preset") == "overhead":
        costs = overhead_tables(content)
        texts["overhead.md"] = "\n".join(costs_table.as_markdown() for costs_table in costs)
        texts["overhead.tex"] = "".join(costs_table.as_latex() for costs_table in costs)
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
    print_table(main.as_rich())
    for costs in overhead_tables(content) if content.get("preset") == "overhead" else ():
        print_table(costs.as_rich())
    print("\n".join(main.notes))


def _page(content: Json) -> Page:
    tasks, seeds = content["tasks"], content["seeds"]
    orders = "one task order" if len(seeds) == 1 else f"{len(seeds)} task orders"
    page = Page(
        f"{content['settings']['modelpool']}: {len(content['methods'])} methods",
        f"{len(tasks)} models merged one after another, {orders} ({', '.join(map(str, seeds))})",
    )
    tables = [main_table(content), task_table(content)]
    if content.get("preset") == "overhead":
        tables += overhead_tables(content)
    page.texts(tables[0])
    charts = charts_of(content, panels=False)
    for name, title in PICTURES.items():
        if name in charts:
            page.heading(title.format(seed=seeds[0]))
            page.chart(charts[name])
    if matrices := first_seed(content):
        page.words("Side by side, after the step that the slider chooses:")
        scores = {label: (100 * matrix.values).tolist() for label, matrix in matrices.items()}
        page.chart(bars_by_step(scores, next(iter(matrices.values())).tasks))
    for table in tables[1:]:
        page.texts(table)
    page.heading("Configuration")
    page.details("settings", content["settings"])
    page.details("methods", {label: row["overrides"] for label, row in content["methods"].items()})
    page.details("versions", content["environment"])
    return page
