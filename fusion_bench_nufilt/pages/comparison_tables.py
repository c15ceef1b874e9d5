"""The content of a comparison's tables."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

import pandas as pd

from .content import ComparisonContent, Json, Method, Published
from .metrics import METRICS, Mean, percent
from .tables import Table

_NOTED = "†"  # marks a printed number that has a note below the table
_COSTS = ("iterations", "solving s", "total s", "memory GB", "parameters M")
_PRINTED_COSTS = ("iterations", "solving_seconds", "total_seconds", "gpu_gigabytes", "parameters_millions")
_HEADLINE = [name for name, metric in METRICS.items() if metric.headline]


def main_table(results: ComparisonContent) -> Table:
    """Tabulate the headline metrics, mean ± standard deviation over the seeds, beside the paper's numbers."""
    methods, printed = results.methods, results.printed
    rows = [
        {"method": label, "ACC %": percent(Mean.of(scores.values()).mean), "paper ACC": _printed(printed[label], "ACC")}
        for label, scores in results.references.items()
    ]
    complete = all(method.complete for method in methods.values())
    for label, method in methods.items():
        words = {"method": label}
        for name in _HEADLINE:
            words[f"{name} %"] = _measured(method, method.mean(name), sign=METRICS[name].signed)
            words[f"paper {name}"] = _printed(printed[label], name)
        words["extra params"] = _millions(method.known("extra_parameters"))
        words["data"] = method.data
        words["merging s"] = _number(method.mean("merging_seconds").mean)
        words["runs"] = "" if complete else f"{len(method.matrices)}/{len(method.runs)}"
        rows.append(words)
    texts = _filled(pd.DataFrame(rows).fillna(""))
    ranks = _ranks(results, {f"{name} %": [row.mean(name) for row in methods.values()] for name in _HEADLINE})
    title = f"{len(results.tasks)} models merged one after another"
    return Table(title, texts, ranks, len(results.references), _notes(results, _HEADLINE))


def task_table(results: ComparisonContent) -> Table:
    """Tabulate the score of each task after the last step, mean ± standard deviation over the seeds."""
    tasks, references, methods = results.tasks, results.references, results.methods
    rows = {label: [percent(Mean.of([scores[task]]).mean) for task in tasks] for label, scores in references.items()}
    rows |= {label: [_measured(row, row.final(task)) for task in tasks] for label, row in methods.items()}
    for label, numbers in results.printed.items():
        if not numbers.keys().isdisjoint(tasks):
            rows[f"{label}, paper"] = [_printed(numbers, task) for task in tasks]
    texts = pd.DataFrame([[label, *words] for label, words in rows.items()], columns=["method", *tasks])
    ranks = _ranks(results, {task: [row.final(task) for row in methods.values()] for task in tasks})
    title = "Score (%) of each task after the last step"
    return Table(title, _filled(texts), ranks, len(references), _notes(results, tasks))


def overhead_tables(results: ComparisonContent) -> list[Table]:
    """Tabulate the cost of merging the whole stream, measured and as the paper prints it; iterations are per step.

    The total is that of merging alone, without loading and scoring; "subspaces" is the time outside the solver. Other
    presets have no such table.
    """
    if results.preset != "overhead":
        return []
    scales = {"solving_seconds": 1, "merging_seconds": 1, "memory": 1e9, "parameters": 1e6}
    ours = {
        label: [
            method.iterations,
            *(method.mean(name).mean / scale for name, scale in scales.items()),
            _measured(method, method.mean("ACC")),
        ]
        for label, method in results.methods.items()
    }
    papers = {
        label: [*(row.get(key, {}).get("value") for key in _PRINTED_COSTS), _printed(row, "ACC").rstrip(_NOTED)]
        for label, row in (results.published_overhead or {}).items()
    }
    memory = "memory: most in use between scorings, with all that stays loaded"
    another = ["not comparable with seconds and memory of another machine", "subspaces: total - solving, computed here"]
    printed_for = "The paper's: ViT-B/32, 8 models, ten orders, on a GPU that it does not name"
    # Of other methods the paper prints the total alone, which contains more than subspaces.
    return [
        _cost_table(f"Cost of merging {len(results.tasks)} models", ours, ours, [*_notes(results, ()), memory]),
        _cost_table(printed_for, papers, [label for label in papers if label.startswith("nufilt")], another),
    ]


def _cost_table(title: str, costs: Mapping[str, Any], with_subspaces: Collection[str], notes: list[str]) -> Table:
    frame = pd.DataFrame.from_dict(dict(costs), orient="index", columns=[*_COSTS, "ACC %"])
    numbers = frame[list(_COSTS)].astype(float)
    rest = (numbers["total s"] - numbers["solving s"]).where(numbers.index.isin(with_subspaces))
    numbers.insert(2, "subspaces s", rest)
    texts = numbers.map(_number).assign(iterations=numbers["iterations"].map(lambda n: _number(n, digits=0)))
    return Table(title, _filled(texts.join(frame["ACC %"]).reset_index(names="method")), notes=notes)


def _filled(texts: pd.DataFrame) -> pd.DataFrame:
    """Return the columns in which some row has a value."""
    return texts.loc[:, ~texts.isin(["", "-", "failed"]).all()]


def method_numbers(results: ComparisonContent) -> pd.DataFrame:
    """Return the numbers of every method as fractions, seconds and bytes, for ``table.csv``."""
    names = {name: name for name in (*METRICS, "merging_seconds", "solving_seconds")} | {"memory_bytes": "memory"}
    references = [
        {"method": label, "ACC_mean": Mean.of(scores.values()).mean, **_printed_fractions(results.printed[label])}
        for label, scores in results.references.items()
    ]
    rows = [
        {"method": label}
        | _both({title: method.mean(name) for title, name in names.items()})
        | {name: method.known(name) for name in ("parameters", "extra_parameters")}
        | {"data": method.data, **_printed_fractions(method.published_percent)}
        | {"finished": " ".join(map(str, method.matrices)), "failed": "; ".join(method.failures)}
        for label, method in results.methods.items()
    ]
    return pd.DataFrame([*references, *rows], columns=list(rows[0]), dtype=object)


def task_numbers(results: ComparisonContent) -> pd.DataFrame:
    """Return the score of each task after the last step as a fraction, for ``per_task.csv``."""
    tasks = results.tasks
    rows: list[Json] = [
        {"method": label} | {f"{task}_mean": scores[task] for task in tasks}
        for label, scores in results.references.items()
    ]
    for label, method in results.methods.items():
        rows.append({"method": label} | _both({task: method.final(task) for task in tasks}))
    return pd.DataFrame(rows, columns=list(rows[-1]), dtype=object)


def _both(means: Mapping[str, Mean]) -> Json:
    return {f"{name}_{key}": getattr(mean, key) for name, mean in means.items() for key in ("mean", "std")}


def _notes(results: ComparisonContent, shown: Sequence[str]) -> list[str]:
    """Return notes on where the numbers come from, what is missing, and the printed numbers that are shown."""
    seeds, settings = results.seeds, results.settings
    over = "mean ± standard deviation over " if len(seeds) > 1 else ""
    notes = [f"{settings['modelpool']}: {len(results.tasks)} tasks; {over}{_seeds(seeds)}"]
    if results.preset == "ranks":
        curves = filter(None, results.curves.values())
        best = (max(curve, key=lambda label: curve[label].mean("ACC").mean) for curve in curves)
        notes.append(f"highest ACC of each panel: {', '.join(best)}")
    if "validation" in settings.get("resolved", {}):
        notes.append(f"scored on {results.scored}")
    if settings.get("overrides"):
        notes.append(f"with {' '.join(settings['overrides'])}")
    if results.environment:  # it is empty where nothing was run
        notes.append(", ".join(f"{name} {version}" for name, version in results.environment.items()))
    matrices = [matrix for method in results.methods.values() for matrix in method.matrices.values()]
    if missing := sorted({task for matrix in matrices for task in matrix.missing}):
        notes.append(f"no score, and not in the means: {', '.join(missing)}")
    for label, method in results.methods.items():
        notes += [f"{label} failed on {_seeds(failed)}: {reason}" for reason, failed in method.failures.items()]
    for label, row in results.printed.items():
        said = [row[name]["note"] for name in shown if name in row]
        notes += [f"{_NOTED} the paper's {label}: {note}" for note in said if note]
    return list(dict.fromkeys(notes))


def _ranks(results: ComparisonContent, columns: Mapping[str, Sequence[Mean]]) -> pd.DataFrame:
    """Rank the methods that finished every seed and need no data; numbers shown as equal rank equally."""
    compared = [method.data == "none" and method.complete for method in results.methods.values()]
    means = pd.DataFrame({name: [mean.mean for mean in column] for name, column in columns.items()})
    means.index += len(results.references)
    return means[compared].round(3).rank(method="dense", ascending=False)


def _printed(row: Published, name: str) -> str:
    """Return a printed value in per cent, with its deviation, and a mark if it has a note."""
    if name not in row:
        return ""
    sign = "+" if name in METRICS and METRICS[name].signed else ""
    value, deviation = row[name]["value"], row[name]["deviation"]
    spread = "" if deviation is None else f" ± {deviation:.1f}"
    return f"{value:{sign}.1f}{spread}{_NOTED if row[name]['note'] else ''}"


def _printed_fractions(row: Published) -> Json:
    values = {f"paper_{name}": row[name]["value"] / 100 if name in row else None for name in ("ACC", "BWT")}
    return values | {"paper_note": row.get("ACC", {}).get("note")}


def _measured(method: Method, mean: Mean, *, sign: bool = False) -> str:
    return mean.percent(sign=sign) if method.matrices else "failed"


def _millions(number: int | None) -> str:
    return "-" if number is None else f"{number / 1e6:.3g} M" if number else "none"


def _number(number: float, digits: int = 1) -> str:
    if math.isnan(number):
        return "-"
    return f"{number:.{digits}f}" if number >= 0.1 or number == 0 else f"{number:.2g}"


def _seeds(numbers: Sequence[int]) -> str:
    """Return words such as ``seed 42`` or ``seeds 42-51, 60``."""
    ranges = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        ranges.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    return f"seed{'s' if len(numbers) > 1 else ''} {', '.join(ranges)}"
