"""What the tables of a comparison say, read from the content of ``results.json``."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

import pandas as pd

from .metrics import METRICS, Mean, percent
from .tables import Table

Json = dict[str, Any]

_NOTED = "†"  # beside a printed number about which something is said below the table
_COSTS = ("iterations", "solving s", "total s", "memory GB", "parameters M")
_PRINTED_COSTS = ("iterations", "solving_seconds", "total_seconds", "gpu_gigabytes", "parameters_millions")
_HEADLINE = [name for name, metric in METRICS.items() if metric.headline]


def main_table(content: Json) -> Table:
    """Tabulate the headline metrics, mean ± standard deviation over the seeds, beside the paper's numbers."""
    methods, printed = content["methods"], _published(content)
    rows = [
        {"method": label, "ACC %": percent(Mean.of(scores.values()).mean), "paper ACC": _printed(printed[label], "ACC")}
        for label, scores in content["references"].items()
    ]
    complete = all(map(_is_complete, methods.values()))
    for label, row in methods.items():
        words = {"method": label}
        for name in _HEADLINE:
            words[f"{name} %"] = _measured(row, row.get(name), sign=METRICS[name].signed)
            words[f"paper {name}"] = _printed(printed[label], name)
        words["extra params"] = _millions(row.get("extra_parameters"))
        words["data"] = row.get("data") or "none"
        words["merging s"] = _number(Mean.from_json(row["merging_seconds"]).mean)
        words["runs"] = "" if complete else f"{len(finished(row))}/{len(row['runs'])}"
        rows.append(words)
    texts = pd.DataFrame(rows).fillna("")
    texts = texts.loc[:, ~texts.isin(["", "-", "failed"]).all()]
    ranks = _ranks(content, {f"{name} %": [row.get(name) for row in methods.values()] for name in _HEADLINE})
    title = f"{len(content['tasks'])} models merged one after another"
    return Table(title, texts, ranks, len(content["references"]), _notes(content, _HEADLINE))


def task_table(content: Json) -> Table:
    """Tabulate the score of each task after the last step, mean ± standard deviation over the seeds."""
    tasks, references, methods = content["tasks"], content["references"], content["methods"]
    rows = {label: [percent(Mean.of([scores[task]]).mean) for task in tasks] for label, scores in references.items()}
    rows |= {label: [_measured(row, row["final"][task]) for task in tasks] for label, row in methods.items()}
    for label, numbers in _published(content).items():
        if not numbers.keys().isdisjoint(tasks):
            rows[f"{label}, paper"] = [_printed(numbers, task) for task in tasks]
    texts = pd.DataFrame([[label, *words] for label, words in rows.items()], columns=["method", *tasks])
    ranks = _ranks(content, {task: [row["final"][task] for row in methods.values()] for task in tasks})
    title = "Score (%) of each task after the last step"
    return Table(title, texts, ranks, len(references), _notes(content, tasks))


def overhead_tables(content: Json) -> list[Table]:
    """Tabulate what merging costs, and what the paper prints for it: of the whole stream, but iterations of each step.

    The total is merging alone, without loading and scoring; subspaces are what is not the solver. There is no table of
    a comparison with another preset.
    """
    if content.get("preset") != "overhead":
        return []
    ours = {
        label: [
            row.get("iterations"),
            _of_runs(row, "solving_seconds").mean,
            Mean.from_json(row["merging_seconds"]).mean,
            _of_runs(row, "memory").mean / 1e9,
            _of_runs(row, "parameters").mean / 1e6,
            _measured(row, row["ACC"]),
        ]
        for label, row in content["methods"].items()
    }
    papers = {
        label: [*(row.get(key, {}).get("value") for key in _PRINTED_COSTS), _printed(row, "ACC").rstrip(_NOTED)]
        for label, row in content.get("published_overhead", {}).items()
    }
    memory = "memory: most in use between scorings, with all that stays loaded"
    another = ["not comparable with seconds and memory of another machine", "subspaces: total - solving, computed here"]
    printed_for = "The paper's: ViT-B/32, 8 models, ten orders, on a GPU that it does not name"
    # The total of other methods than NUFILT has more than subspaces in it, and the paper prints it alone.
    return [
        _cost_table(f"Cost of merging {len(content['tasks'])} models", ours, ours, [*_notes(content, ()), memory]),
        _cost_table(printed_for, papers, [label for label in papers if label.startswith("nufilt")], another),
    ]


def _cost_table(title: str, costs: Mapping[str, Any], with_subspaces: Collection[str], notes: list[str]) -> Table:
    frame = pd.DataFrame.from_dict(dict(costs), orient="index", columns=[*_COSTS, "ACC %"])
    numbers = frame[list(_COSTS)].astype(float)
    rest = (numbers["total s"] - numbers["solving s"]).where(numbers.index.isin(with_subspaces))
    numbers.insert(2, "subspaces s", rest)
    texts = numbers.map(_number).assign(iterations=numbers["iterations"].map(lambda n: _number(n, digits=0)))
    return Table(title, texts.join(frame["ACC %"]).reset_index(names="method"), notes=notes)


def method_numbers(content: Json) -> pd.DataFrame:
    """Return the numbers of every method as fractions, seconds and bytes, for ``table.csv``."""
    printed = _published(content)
    references = [
        {"method": label, "ACC_mean": Mean.of(scores.values()).mean, **_printed_fractions(printed[label])}
        for label, scores in content["references"].items()
    ]
    rows = []
    for label, row in content["methods"].items():
        means = {name: Mean.from_json(row.get(name)) for name in (*METRICS, "merging_seconds")}
        means |= {"solving_seconds": _of_runs(row, "solving_seconds"), "memory_bytes": _of_runs(row, "memory")}
        known = (run["parameters"] for run in finished(row).values() if run["parameters"] is not None)
        rows.append(
            {"method": label}
            | {f"{name}_{key}": getattr(mean, key) for name, mean in means.items() for key in ("mean", "std")}
            | {"parameters": next(known, None)}
            | {key: row.get(key) for key in ("extra_parameters", "data")}
            | _printed_fractions(printed[label])
            | {"finished": " ".join(finished(row)), "failed": "; ".join(_failures(row))}
        )
    return pd.DataFrame([*references, *rows], columns=list(rows[0]), dtype=object)


def task_numbers(content: Json) -> pd.DataFrame:
    """Return the score of each task after the last step as a fraction, for ``per_task.csv``."""
    tasks = content["tasks"]
    rows = {label: {f"{task}_mean": scores[task] for task in tasks} for label, scores in content["references"].items()}
    for label, row in content["methods"].items():
        rows[label] = {f"{task}_{key}": row["final"][task][key] for task in tasks for key in ("mean", "std")}
    columns = ["method", *(f"{task}_{key}" for task in tasks for key in ("mean", "std"))]
    return pd.DataFrame([{"method": label, **row} for label, row in rows.items()], columns=columns, dtype=object)


def finished(row: Json) -> dict[str, Json]:
    """Return the runs of a method that did not fail, by seed."""
    return {seed: run for seed, run in row["runs"].items() if run["accuracy_matrix"] is not None}


def _notes(content: Json, shown: Sequence[str]) -> list[str]:
    """Where the numbers come from, what is missing, and what is to be said of the printed numbers that are shown."""
    seeds, settings = content["seeds"], content["settings"]
    over = "mean ± standard deviation over " if len(seeds) > 1 else ""
    notes = [f"{settings['modelpool']}: {len(content['tasks'])} tasks; {over}{_seeds(seeds)}"]
    if settings.get("overrides"):
        notes.append(f"with {' '.join(settings['overrides'])}")
    if content["environment"]:  # there is none where nothing was run
        notes.append(", ".join(f"{name} {version}" for name, version in content["environment"].items()))
    runs = [run for row in content["methods"].values() for run in finished(row).values()]
    last_scores = (pair for run in runs for pair in zip(run["tasks"], run["accuracy_matrix"][-1], strict=True))
    if missing := sorted({task for task, score in last_scores if score is None}):
        notes.append(f"no score, and not in the means: {', '.join(missing)}")
    for label, row in content["methods"].items():
        notes += [f"{label} failed on {_seeds(failed)}: {reason}" for reason, failed in _failures(row).items()]
    for label, row in _published(content).items():
        notes += [
            f"{_NOTED} the paper's {label}: {row[name]['note']}" for name in shown if row.get(name, {}).get("note")
        ]
    return list(dict.fromkeys(notes))


def _of_runs(row: Json, key: str) -> Mean:
    return Mean.of(run.get(key) for run in finished(row).values())


def _failures(row: Json) -> dict[str, list[int]]:
    """Return reasons, and the seeds on which a method failed for them."""
    reasons: dict[str, list[int]] = {}
    for seed, run in row["runs"].items():
        if run["error"] is not None:
            reasons.setdefault(run["error"], []).append(int(seed))
    return reasons


def _is_complete(row: Json) -> bool:
    return len(finished(row)) == len(row["runs"])


def _ranks(content: Json, columns: Mapping[str, Sequence[Json | None]]) -> pd.DataFrame:
    """Rank the methods that finished every seed and need no data; what is shown as equal is equal."""
    compared = [row.get("data", "none") == "none" and _is_complete(row) for row in content["methods"].values()]
    means = pd.DataFrame({name: [Mean.from_json(mean).mean for mean in column] for name, column in columns.items()})
    means.index += len(content["references"])
    return means[compared].round(3).rank(method="dense", ascending=False)


def _published(content: Json) -> dict[str, Json]:
    """Return the paper's numbers in per cent, by the names of all rows; empty for a row without any."""
    references = content.get("published_percent", {})
    return {label: references.get(label, {}) for label in content["references"]} | {
        label: row["published_percent"] for label, row in content["methods"].items()
    }


def _printed(row: Json, name: str) -> str:
    """The printed value of a metric or a task, in per cent, with its deviation, and a mark if it has a note."""
    if name not in row:
        return ""
    sign = "+" if name in METRICS and METRICS[name].signed else ""
    value, deviation = row[name]["value"], row[name]["deviation"]
    spread = "" if deviation is None else f" ± {deviation:.1f}"
    return f"{value:{sign}.1f}{spread}{_NOTED if row[name]['note'] else ''}"


def _printed_fractions(row: Json) -> Json:
    values = {f"paper_{name}": row[name]["value"] / 100 if name in row else None for name in ("ACC", "BWT")}
    return values | {"paper_note": row.get("ACC", {}).get("note")}


def _measured(row: Json, mean: Json | None, *, sign: bool = False) -> str:
    return Mean.from_json(mean).percent(sign=sign) if finished(row) else "failed"


def _millions(number: int | None) -> str:
    return "-" if number is None else f"{number / 1e6:.3g} M" if number else "none"


def _number(number: float, digits: int = 1) -> str:
    if math.isnan(number):
        return "-"
    return f"{number:.{digits}f}" if number >= 0.1 or number == 0 else f"{number:.2g}"


def _seeds(numbers: Sequence[int]) -> str:
    """``seed 42``, ``seeds 42-51, 60``."""
    ranges = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        ranges.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    return f"seed{'s' if len(numbers) > 1 else ''} {', '.join(ranges)}"
