"""What a comparison leaves in its folder: tables, pictures, and all numbers as JSON and CSV."""

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fusion_bench_nufilt.compare.paper import Published
from fusion_bench_nufilt.compare.store import references_as_json
from fusion_bench_nufilt.compare.summary import Comparison, Mean
from fusion_bench_nufilt.results import comparison_pictures as plots
from fusion_bench_nufilt.results.metrics import or_none
from fusion_bench_nufilt.results.write import leave_page
from fusion_bench_nufilt.storage.files import atomic_file, write_text

from .comparison_tables import as_latex, as_markdown, main_table, task_table
from .overhead import overhead_table, printed_overhead

PICTURES = {
    "accuracy_per_step.png": plots.accuracy_per_step,
    "stability_plasticity.png": plots.stability_plasticity,
    "accuracy_matrices.png": plots.accuracy_matrices,
    "ablation.png": plots.ablation,
    "sensitivity.png": plots.sensitivity,
}


def save_report(comparison: Comparison, folder: Path) -> list[str]:
    """Write tables and pictures, each whole or not at all; pictures that say nothing are left out.

    Scores are per cent in ``.md``, ``.tex`` and pictures, fractions in ``.json`` and ``.csv``.

    Returns:
        The names of the files.
    """
    table, tasks = main_table(comparison), task_table(comparison)
    texts = {
        "table.md": as_markdown(table),
        "table.tex": as_latex(table),
        "table.csv": _csv(_method_rows(comparison)),
        "per_task.md": as_markdown(tasks),
        "per_task.tex": as_latex(tasks),
        "per_task.csv": _csv(_task_rows(comparison)),
        "results.json": json.dumps(_results(comparison), indent=2),
    }
    if comparison.preset == "overhead":
        costs = overhead_table(comparison)
        texts["overhead.md"] = as_markdown(costs) + "\n" + as_markdown(printed_overhead())
        texts["overhead.tex"] = as_latex(costs) + as_latex(printed_overhead())
    for name, text in texts.items():
        write_text(folder / name, text)
    wanted = _wanted(comparison)
    for name, plot in PICTURES.items():
        if name in wanted:
            _save(plot(comparison), folder / name)
        else:  # of another comparison
            (folder / name).unlink(missing_ok=True)
    return [*texts, *wanted, *leave_page(folder)]


def _wanted(comparison: Comparison) -> list[str]:
    """Pictures there are numbers for."""
    finished = comparison.finished
    if not finished:
        return []
    names = ["accuracy_matrices.png"]
    if any(not math.isnan(method.metrics["BWT"].mean) for method in finished):
        names.append("stability_plasticity.png")
    if comparison.settings["evaluate"].startswith("every_step"):
        names.append("accuracy_per_step.png")
    if comparison.preset == "ablation":
        names.append("ablation.png")
    if comparison.preset == "sensitivity":
        names.append("sensitivity.png")
    return names


def _save(figure: Figure, file: Path) -> None:
    with atomic_file(file) as temporary:
        figure.savefig(temporary, dpi=200, format="png")


def _method_rows(comparison: Comparison) -> Iterable[dict[str, Any]]:
    printed = comparison.published
    for label in comparison.references:
        yield {"method": label, "ACC_mean": comparison.reference(label), **_paper(printed.get(label, {}))}
    for method in comparison.methods:
        yield {
            "method": method.spec.label,
            **_pairs(method.metrics),
            **_pairs({"merging_seconds": method.seconds, "solving_seconds": method.solving_seconds}),
            **_pairs({"memory_bytes": method.memory}),
            "parameters": method.parameters,
            "extra_parameters": method.extra_parameters,
            "data": method.data,
            **_paper(printed.get(method.spec.label, {})),
            "finished": " ".join(str(run.seed) for run in method.runs if run.matrix is not None),
            "failed": "; ".join(method.failures),
        }


def _paper(numbers: Published) -> dict[str, float | str | None]:
    """The printed metrics, as fractions, and what is to be said of them."""
    values = {f"paper_{name}": numbers[name].value / 100 if name in numbers else None for name in ("ACC", "BWT")}
    return {**values, "paper_note": numbers["ACC"].note if "ACC" in numbers else None}


def _task_rows(comparison: Comparison) -> Iterable[dict[str, Any]]:
    for label, scores in comparison.references.items():
        yield {"method": label, **{f"{task}_mean": scores[task] for task in comparison.tasks}}
    for method in comparison.methods:
        yield {"method": method.spec.label, **_pairs({task: method.final(task) for task in comparison.tasks})}


def _pairs(means: Mapping[str, Mean]) -> dict[str, float]:
    """Two columns for each: its mean and its deviation."""
    pairs = ({f"{name}_mean": mean.mean, f"{name}_std": mean.std} for name, mean in means.items())
    return {column: value for pair in pairs for column, value in pair.items()}


def _csv(rows: Iterable[dict[str, Any]]) -> str:
    rows = list(rows)
    text = io.StringIO()
    header = dict.fromkeys(key for row in reversed(rows) for key in row)
    writer = csv.DictWriter(text, list(header), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: "" if or_none(value) is None else value for key, value in row.items()})
    return text.getvalue()


def _results(comparison: Comparison) -> dict[str, Any]:
    printed = comparison.published
    return {
        "settings": comparison.settings,
        "environment": comparison.environments,
        "tasks": comparison.tasks,
        "seeds": comparison.seeds,
        "references": references_as_json(comparison.references),
        "methods": {
            method.spec.label: {
                "overrides": list(method.spec.overrides),
                **{name: mean.as_json() for name, mean in method.metrics.items()},
                "merging_seconds": method.seconds.as_json(),
                "extra_parameters": method.extra_parameters,
                "data": method.data,
                "final": {task: method.final(task).as_json() for task in comparison.tasks},
                "published_percent": {
                    name: number._asdict() for name, number in printed.get(method.spec.label, {}).items()
                },
                "runs": {str(run.seed): run.as_json() for run in method.runs},
            }
            for method in comparison.methods
        },
    }
