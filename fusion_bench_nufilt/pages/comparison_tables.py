"""The tables of a comparison, each a pivot of its long table of results."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from .content import Comparison
from .metrics import COSTS, HEADLINE, METRICS, Mean, as_shown, shown_number
from .page import sentences
from .results import means, rows_with
from .tables import Table

_RANKED = (
    "best (bold) and second best (underlined) of the methods that need no data and lack no score"
)
#: The notes on columns whose titles don't say it.
_MEANINGS = {
    "changed": "changed: how many tensors of the pretrained model have other values in the merged "
    "one, and the share of its parameters in them",
    COSTS["total_seconds"].title: "total: merging and set-up of data, without loading, saving and "
    "scoring",
    COSTS["memory"].title: "memory: most in use between scorings, with all that stays loaded",
}
_SECONDS = ["merging_seconds", "data_seconds"]
#: With the preset ``overhead``; iterations are those of a step.
_ALL_COSTS = [
    "iterations",
    "solving_seconds",
    *_SECONDS,
    "total_seconds",
    "memory",
    "parameters",
]


def main_table(results: Comparison) -> Table:
    """Tabulate the headline metrics, mean ± standard deviation over the seeds, and what they cost,
    means over the seeds.
    """
    costs = _ALL_COSTS if results.preset == "overhead" else _SECONDS
    measured = means(results.table, "metric", results.labels, [*HEADLINE, *costs])

    texts = pd.DataFrame(index=results.labels)
    for name in HEADLINE:
        words = [mean_words(results, label, mean, name) for label, mean in measured[name].items()]
        texts[METRICS[name].title] = words
    extra_parameters = _first_values(results, "extra_parameters")
    texts["extra params"] = [_millions(number) for number in extra_parameters]
    texts["changed"] = _changed_words(results)
    texts["data"] = pd.Series({label: method.data for label, method in results.methods.items()})
    for name in costs:
        digits = 0 if name == "iterations" else 1
        numbers = [mean.mean / COSTS[name].unit for mean in measured[name]]
        texts[COSTS[name].title] = [shown_number(number, digits) for number in numbers]
    texts["runs"] = ""
    if not all(method.complete for method in results.methods.values()):
        for label, method in results.methods.items():
            texts.loc[label, "runs"] = f"{len(method.finished)}/{len(method.runs)}"
    # Single models are scored, and not merged.
    of_merged = [METRICS[name].title for name in HEADLINE if name != "ACC"]
    of_merged += ["extra params", "changed", *(COSTS[name].title for name in costs)]
    texts.loc[list(results.references), of_merged] = ""

    ranks = _ranks(results, measured[HEADLINE], HEADLINE)
    ranks = ranks.rename(columns={name: METRICS[name].title for name in HEADLINE})
    table = _table(results, results.stream, texts.fillna(""), ranks)
    table.notes.extend(note for title, note in _MEANINGS.items() if title in table.texts)
    return table


def _changed_words(results: Comparison) -> list[str]:
    """Return how many tensors each method changed, with their share of the parameters."""
    tensors = _first_values(results, "changed_tensors")
    shares = means(results.table, "metric", results.labels, ["changed_share"])["changed_share"]
    words = []
    for label in results.labels:
        if pd.isna(tensors[label]):
            words.append("-")
        else:
            words.append(f"{tensors[label]} ({100 * shares[label].mean:.0f} %)")
    return words


def task_table(results: Comparison) -> Table:
    """Tabulate the score of each task after the last step, mean ± standard deviation over the
    seeds.
    """
    scores = means(results.last_scores, "task", results.labels, results.tasks)
    texts = pd.DataFrame(index=results.labels)
    for task in results.tasks:
        words = []
        for label, mean in scores[task].items():
            other_metrics = results.unaveraged(label, task)
            if mean.count == 0 and other_metrics:
                words.append(_other_words(other_metrics))
            else:
                words.append(mean_words(results, label, mean))
        texts[task] = words
    title = "Score (%) of each task after the last step"
    return _table(results, title, texts, _ranks(results, scores))


def mean_words(results: Comparison, label: str, mean: Mean, metric: str = "") -> str:
    """Return the mean of a metric, or of a task's score, in per cent, such as ``75.7 ± 0.3``; one
    that lacks scores says of how many it is, and a method whose runs all failed says so.
    """
    if label in results.failed:
        return "failed"
    words = mean.percent(sign=metric != "" and METRICS[metric].signed)
    part = results.missing_part(label, mean, metric)
    return f"{words} ({part})" if part else words


def _other_words(other_metrics: Mapping[str, Mean]) -> str:
    """Return metrics of unknown scale as words, such as ``points 11.95 ± 0.2``."""
    words = []
    for metric, mean in other_metrics.items():
        deviation = "" if math.isnan(mean.std) else f" ± {mean.std:.2g}"
        words.append(f"{metric} {mean.mean:.4g}{deviation}")
    return ", ".join(words)


def _ranks(results: Comparison, numbers: pd.DataFrame, metrics: Sequence[str] = ()) -> pd.DataFrame:
    """Rank the methods that finished every seed, need no data and lack no score; numbers shown as
    equal rank equally, and a column in which all are equal is left out.

    Columns are ``metrics``, or else tasks, one of which may have the name of a metric.
    """
    compared = []
    for label, method in results.methods.items():
        # The mean of fewer seeds is one over other orders, and data are what the others do without.
        if method.data == "none" and method.complete:
            compared.append(label)
    ranks = pd.DataFrame(index=compared)
    for name in numbers:
        shown_numbers = {}
        for label in compared:
            mean = numbers.loc[label, name]
            # The tasks that it lacks may be the ones on which the others score least.
            if not results.missing_part(label, mean, name if metrics else ""):
                # No number is better than one that reads the same.
                shown_numbers[label] = as_shown(mean.mean)
        column = pd.Series(shown_numbers, dtype=float)
        column = column.rank(method="dense", ascending=False)
        if column.max() > 1:
            ranks[name] = column
    return ranks


def _table(results: Comparison, title: str, texts: pd.DataFrame, ranks: pd.DataFrame) -> Table:
    """Return the columns in which some row has a value, with the notes of a comparison."""
    texts = texts.loc[:, ~texts.isin(["", "-", "failed"]).all()].rename_axis("method")
    notes = _notes(results)
    if not ranks.empty:
        notes.insert(1, _RANKED)
    return Table(title, texts, ranks, len(results.references), notes)


def _first_values(results: Comparison, metric: str) -> "pd.Series[int]":
    """Return a whole number of every method, that of its first run that has it; where none has, it
    is missing.
    """
    rows = rows_with(results.table, metric=metric)
    # With a capital, pandas' integers can be missing; others would become floats.
    return rows.groupby("method")["value"].first().reindex(results.labels).astype("Int64")


def _notes(results: Comparison) -> list[str]:
    """Return notes on the numbers of a comparison's tables."""
    best = []
    if results.preset == "ranks":
        best = _best_values(results)
    missing = set()
    for method in results.methods.values():
        for run in method.finished.values():
            missing.update(run.missing)
    notes = sentences("notes.txt", results=results, best=best, missing=sorted(missing))
    return list(dict.fromkeys(notes))


def by_accuracy(results: Comparison, labels: Sequence[str]) -> list[str]:
    """Return methods from the highest ACC to the lowest, and last those that lack scores."""
    accuracy = means(results.table, "metric", labels, ["ACC"])["ACC"]
    whole = []
    partial = []
    for label in sorted(labels, key=lambda label: -accuracy[label].mean):
        if results.missing_part(label, accuracy[label], "ACC"):
            partial.append(label)
        else:
            whole.append(label)
    return whole + partial


def _best_values(results: Comparison) -> list[str]:
    """Return the value with the highest ACC of each panel, such as ``null_rank=21``."""
    best = []
    for panel in results.panels or ():
        curve = results.curve(panel)
        if curve:
            highest = by_accuracy(results, list(curve))[0]
            best.append(f"{panel['key']}={curve[highest].config[panel['key']]}")
    return best


def _millions(number: Any) -> str:
    if pd.isna(number):  # an integer column's missing value is no float
        return "-"
    if number == 0:
        return "none"
    return f"{number / 1e6:.3g} M"
