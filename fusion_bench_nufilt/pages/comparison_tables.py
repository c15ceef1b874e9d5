"""The content of a comparison's tables."""

import math
from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from .content import ComparisonContent, Json, Method, Published, Scores
from .metrics import METRICS, Mean, percent
from .page import sentences
from .tables import Table

_NOTED = "†"  # marks a printed number that has a note below the table
_HEADLINE = [name for name, metric in METRICS.items() if metric.headline]
_COSTS = ["iterations", "solving s", "subspaces s", "total s", "memory GB", "parameters M"]
_MEASURED_COSTS = ("solving_seconds", "merging_seconds", "memory", "parameters")
_PRINTED_COSTS = (
    "iterations",
    "solving_seconds",
    "total_seconds",
    "gpu_gigabytes",
    "parameters_millions",
)


def main_table(results: ComparisonContent) -> Table:
    """Tabulate the headline metrics, mean ± standard deviation over the seeds, beside the paper's
    numbers.
    """
    complete = all(method.complete for method in results.methods.values())

    def of_single_models(scores: Scores, printed: Published) -> Json:
        return {
            "ACC %": percent(Mean.of(scores.values()).mean),
            "paper ACC": _printed(printed, "ACC"),
        }

    def of_method(method: Method) -> Json:
        row = {}
        for name in _HEADLINE:
            row[f"{name} %"] = method.words(method.mean(name), sign=METRICS[name].signed)
            row[f"paper {name}"] = _printed(method.published_percent, name)
        row["extra params"] = _millions(method.known("extra_parameters"))
        row["data"] = method.data
        row["merging s"] = _number(method.mean("merging_seconds").mean)
        row["runs"] = "" if complete else f"{len(method.matrices)}/{len(method.runs)}"
        return row

    texts = _rows(results, of_single_models, of_method).fillna("")
    means = {
        f"{name} %": [method.mean(name) for method in results.methods.values()]
        for name in _HEADLINE
    }
    return _ranked(
        results, f"{len(results.tasks)} models merged one after another", texts, means, _HEADLINE
    )


def task_table(results: ComparisonContent) -> Table:
    """Tabulate the score of each task after the last step, mean ± standard deviation over the
    seeds.
    """
    tasks = results.tasks
    measured = _rows(
        results,
        lambda scores, _: {task: Mean.of([scores[task]]).percent() for task in tasks},
        lambda method: {task: method.words(method.final(task)) for task in tasks},
    )
    printed = [
        {"method": f"{label}, paper"} | {task: _printed(numbers, task) for task in tasks}
        for label, numbers in results.printed.items()
        if not numbers.keys().isdisjoint(tasks)
    ]
    texts = pd.concat(
        [measured, pd.DataFrame(printed, columns=measured.columns)], ignore_index=True
    )
    means = {task: [method.final(task) for method in results.methods.values()] for task in tasks}
    return _ranked(results, "Score (%) of each task after the last step", texts, means, tasks)


def _ranked(
    results: ComparisonContent,
    title: str,
    texts: pd.DataFrame,
    means: Mapping[str, Sequence[Mean]],
    shown: Sequence[str],
) -> Table:
    """Rank the methods that finished every seed and need no data; numbers shown as equal rank
    equally, and where all are equal, none is the best.
    """
    compared = [method.data == "none" and method.complete for method in results.methods.values()]
    numbers = pd.DataFrame({name: [mean.mean for mean in column] for name, column in means.items()})
    numbers.index += len(results.references)
    ranks = numbers[compared].round(3).rank(method="dense", ascending=False)
    ranks = ranks.loc[:, ranks.max() > 1]
    return Table(title, _filled(texts), ranks, len(results.references), _notes(results, shown))


def overhead_tables(results: ComparisonContent) -> list[Table]:
    """Tabulate the cost of merging the whole stream, without loading and scoring, measured and as
    the paper prints it.

    Iterations are per step, and "subspaces" is the time outside the solver. Other presets have no
    such table.
    """
    if results.preset != "overhead":
        return []
    ours, papers = [], []
    for label, method in results.methods.items():
        solving, total, memory, parameters = (method.mean(name).mean for name in _MEASURED_COSTS)
        costs = (solving, total - solving, total, memory / 1e9, parameters / 1e6)
        ours.append(
            [
                label,
                _number(method.iterations, 0),
                *map(_number, costs),
                method.words(method.mean("ACC")),
            ]
        )
    for label, row in (results.published_overhead or {}).items():
        values = (row.get(name, {}).get("value", math.nan) for name in _PRINTED_COSTS)
        iterations, solving, total, memory, parameters = values
        # Of other methods the paper prints the total alone, which contains more than subspaces.
        subspaces = total - solving if label.startswith("nufilt") else math.nan
        costs = (solving, subspaces, total, memory, parameters)
        papers.append(
            [
                label,
                _number(iterations, 0),
                *map(_number, costs),
                _printed(row, "ACC").rstrip(_NOTED),
            ]
        )
    memory_note = "memory: most in use between scorings, with all that stays loaded"
    notes = [
        "not comparable with seconds and memory of another machine",
        "subspaces: total - solving, computed here",
    ]
    printed_for = "The paper's: ViT-B/32, 8 models, ten orders, on a GPU that it does not name"
    return [
        _cost_table(
            f"Cost of merging {len(results.tasks)} models",
            ours,
            [*_notes(results, ()), memory_note],
        ),
        _cost_table(printed_for, papers, notes),
    ]


def _cost_table(title: str, rows: list[list[str]], notes: list[str]) -> Table:
    return Table(
        title, _filled(pd.DataFrame(rows, columns=["method", *_COSTS, "ACC %"])), notes=notes
    )


def _filled(texts: pd.DataFrame) -> pd.DataFrame:
    """Return the columns in which some row has a value."""
    return texts.loc[:, ~texts.isin(["", "-", "failed"]).all()]


def method_numbers(results: ComparisonContent) -> pd.DataFrame:
    """Return the numbers of every method as fractions, seconds and bytes, for ``table.csv``."""
    names = {name: name for name in (*METRICS, "merging_seconds", "solving_seconds")} | {
        "memory_bytes": "memory"
    }
    return _rows(
        results,
        lambda scores, printed: {
            "ACC_mean": Mean.of(scores.values()).mean,
            **_printed_fractions(printed),
        },
        lambda method: {
            **_mean_and_std({title: method.mean(name) for title, name in names.items()}),
            **{name: method.known(name) for name in ("parameters", "extra_parameters")},
            "data": method.data,
            **_printed_fractions(method.published_percent),
            "finished": " ".join(map(str, method.matrices)),
            "failed": "; ".join(method.failures),
        },
    )


def task_numbers(results: ComparisonContent) -> pd.DataFrame:
    """Return the score of each task after the last step as a fraction, for ``per_task.csv``."""
    return _rows(
        results,
        lambda scores, _: {f"{task}_mean": scores[task] for task in results.tasks},
        lambda method: _mean_and_std({task: method.final(task) for task in results.tasks}),
    )


def _rows(
    results: ComparisonContent,
    of_single_models: Callable[[Scores, Published], Json],
    of_method: Callable[[Method], Json],
) -> pd.DataFrame:
    """Return a row for each kind of single models, given their scores and the paper's, and one for
    each method.
    """
    rows = [
        {"method": label} | of_single_models(scores, results.printed[label])
        for label, scores in results.references.items()
    ]
    methods = [{"method": label} | of_method(method) for label, method in results.methods.items()]
    return pd.DataFrame([*rows, *methods], columns=list(methods[0]), dtype=object)


def _mean_and_std(means: Mapping[str, Mean]) -> Json:
    return {
        f"{name}_{key}": getattr(mean, key)
        for name, mean in means.items()
        for key in ("mean", "std")
    }


def _notes(results: ComparisonContent, shown: Sequence[str]) -> list[str]:
    """Return notes on the numbers of a table that shows these metrics or tasks."""
    best = _best_values(results) if results.preset == "ranks" else []
    matrices = [
        matrix for method in results.methods.values() for matrix in method.matrices.values()
    ]
    missing = sorted({task for matrix in matrices for task in matrix.missing})
    notes = sentences("notes.txt", results=results, shown=shown, best=best, missing=missing)
    return list(dict.fromkeys(notes))


def _best_values(results: ComparisonContent) -> list[str]:
    """Return the value with the highest ACC of each panel, such as ``null_rank=21``."""
    best = []
    for panel in results.panels or ():
        curve = results.curves[panel["symbol"]].values()
        if curve:
            highest = max(curve, key=lambda method: method.mean("ACC").mean)
            best.append(f"{panel['key']}={highest.config[panel['key']]}")
    return best


def _printed(row: Published, name: str) -> str:
    """Return a printed value in per cent, with its deviation, and a mark if it has a note."""
    if name not in row:
        return ""
    sign = "+" if name in METRICS and METRICS[name].signed else ""
    text, deviation = f"{row[name]['value']:{sign}.1f}", row[name]["deviation"]
    if deviation is not None:
        text += f" ± {deviation:.1f}"
    return text + _NOTED if row[name]["note"] else text


def _printed_fractions(row: Published) -> Json:
    values = {
        f"paper_{name}": row[name]["value"] / 100 if name in row else None
        for name in ("ACC", "BWT")
    }
    return values | {"paper_note": row.get("ACC", {}).get("note")}


def _millions(number: int | None) -> str:
    if number is None:
        return "-"
    return f"{number / 1e6:.3g} M" if number else "none"


def _number(number: float | None, digits: int = 1) -> str:
    if number is None or math.isnan(number):
        return "-"
    return f"{number:.{digits}f}" if number >= 0.1 or number == 0 else f"{number:.2g}"
