"""What the tables of a comparison say, read from the content of ``results.json``."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from .metrics import METRICS, Mean, percent
from .tables import Table

Json = dict[str, Any]

_NOTED = "†"  # beside a printed number about which something is said below the table
_COSTS = ("iterations", "solving s", "total s", "memory GB", "parameters M")
_HEADLINE = [name for name, metric in METRICS.items() if metric.headline]


def main_table(content: Json) -> Table:
    """Tabulate the headline metrics, mean ± standard deviation over the seeds, beside the paper's numbers."""
    printed = _published(content)
    rows = [
        {"method": label, "ACC %": percent(Mean.of(scores.values()).mean), **_printed(printed[label], ["ACC"])}
        for label, scores in content["references"].items()
    ]
    complete = all(map(_is_complete, content["methods"].values()))
    for label, row in content["methods"].items():
        words = {"method": label}
        for name in _HEADLINE:
            words[f"{name} %"] = _measured(row, row.get(name), sign=METRICS[name].signed)
            words |= _printed(printed[label], [name])
        words["extra params"] = _millions(row.get("extra_parameters"))
        words["data"] = row.get("data") or "none"
        words["merging s"] = _number(Mean.from_json(row["merging_seconds"]).mean)
        words["runs"] = "" if complete else f"{len(finished(row))}/{len(row['runs'])}"
        rows.append(words)
    texts = pd.DataFrame(rows).fillna("")
    texts = texts.loc[:, ~texts.isin(["", "-", "failed"]).all()]
    ranks = _ranks(content, {f"{name} %": [row.get(name) for row in content["methods"].values()] for name in _HEADLINE})
    notes = [*notes_on(content), *_printed_notes(printed, _HEADLINE)]
    title = f"{len(content['tasks'])} models merged one after another"
    return Table(title, texts, ranks, len(content["references"]), notes)


def task_table(content: Json) -> Table:
    """Tabulate the score of each task after the last step, mean ± standard deviation over the seeds."""
    tasks, methods, printed = content["tasks"], content["methods"], _published(content)
    rows = [
        {"method": label, **{task: Mean.of([scores[task]]).percent() for task in tasks}}
        for label, scores in content["references"].items()
    ]
    rows += [
        {"method": label, **{task: _measured(row, row["final"][task]) for task in tasks}}
        for label, row in methods.items()
    ]
    rows += [
        {"method": f"{label}, paper", **{task: _printed_text(numbers, task) for task in tasks}}
        for label, numbers in printed.items()
        if not numbers.keys().isdisjoint(tasks)
    ]
    ranks = _ranks(content, {task: [row["final"][task] for row in methods.values()] for task in tasks})
    notes = [*notes_on(content), *_printed_notes(printed, tasks)]
    title = "Score (%) of each task after the last step"
    return Table(title, pd.DataFrame(rows), ranks, len(content["references"]), notes)


def overhead_tables(content: Json) -> list[Table]:
    """Tabulate what merging costs, and what the paper prints for it: of the whole stream, but iterations of each step.

    The total is merging alone, without loading and scoring; subspaces are what is not the solver.
    """
    ours = {
        label: {
            "iterations": row.get("iterations"),
            "solving s": _of_runs(row, "solving_seconds").mean,
            "total s": Mean.from_json(row["merging_seconds"]).mean,
            "memory GB": _of_runs(row, "memory").mean / 1e9,
            "parameters M": _of_runs(row, "parameters").mean / 1e6,
            "ACC %": _measured(row, row["ACC"]),
        }
        for label, row in content["methods"].items()
    }
    keys = ("iterations", "solving_seconds", "total_seconds", "gpu_gigabytes", "parameters_millions")
    papers = {
        label: dict(zip(_COSTS, (row[key]["value"] if key in row else None for key in keys), strict=True))
        | {"ACC %": _printed_text(row, "ACC").rstrip(_NOTED)}
        for label, row in content.get("published_overhead", {}).items()
    }
    memory = "memory: most in use between scorings, with all that stays loaded"
    another = ["not comparable with seconds and memory of another machine", "subspaces: total - solving, computed here"]
    printed_for = "The paper's: ViT-B/32, 8 models, ten orders, on a GPU that it does not name"
    # The total of other methods than NUFILT has more than subspaces in it, and the paper prints it alone.
    return [
        _cost_table(f"Cost of merging {len(content['tasks'])} models", ours, list(ours), [*notes_on(content), memory]),
        _cost_table(printed_for, papers, [label for label in papers if label.startswith("nufilt")], another),
    ]


def _cost_table(title: str, costs: Mapping[str, Json], with_subspaces: Sequence[str], notes: list[str]) -> Table:
    frame = pd.DataFrame.from_dict(dict(costs), orient="index")
    numbers = frame[list(_COSTS)].astype(float)
    rest = (numbers["total s"] - numbers["solving s"]).where(numbers.index.isin(with_subspaces))
    numbers.insert(2, "subspaces s", rest)
    texts = numbers.map(_number).assign(iterations=numbers["iterations"].map(lambda n: _number(n, digits=0)))
    return Table(title, texts.assign(**{"ACC %": frame["ACC %"]}).reset_index(names="method"), notes=notes)


def method_numbers(content: Json) -> pd.DataFrame:
    """Return the numbers of every method as fractions, seconds and bytes, for ``table.csv``."""
    rows = []
    printed = _published(content)
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
            | {"finished": " ".join(finished(row)), "failed": "; ".join(failures(row))}
        )
    references = [
        {"method": label, "ACC_mean": Mean.of(scores.values()).mean, **_printed_fractions(printed[label])}
        for label, scores in content["references"].items()
    ]
    return pd.DataFrame([*references, *rows], columns=list(rows[0]), dtype=object)


def task_numbers(content: Json) -> pd.DataFrame:
    """Return the score of each task after the last step as a fraction, for ``per_task.csv``."""
    rows = [
        {"method": label, **{f"{task}_mean": scores[task] for task in content["tasks"]}}
        for label, scores in content["references"].items()
    ]
    for label, row in content["methods"].items():
        final = {f"{task}_{key}": row["final"][task][key] for task in content["tasks"] for key in ("mean", "std")}
        rows.append({"method": label, **final})
    return pd.DataFrame(rows, columns=list(rows[-1]), dtype=object)


def notes_on(content: Json) -> list[str]:
    """Say where the numbers come from, and what is missing."""
    seeds, settings = content["seeds"], content["settings"]
    over = "mean ± standard deviation over " if len(seeds) > 1 else ""
    notes = [f"{settings['modelpool']}: {len(content['tasks'])} tasks; {over}{_seeds(seeds)}"]
    if settings.get("overrides"):
        notes.append(f"with {' '.join(settings['overrides'])}")
    if content["environment"]:  # there is none where nothing was run
        notes.append(", ".join(f"{name} {version}" for name, version in content["environment"].items()))
    runs = [run for row in content["methods"].values() for run in finished(row).values()]
    last_rows = [dict(zip(run["tasks"], run["accuracy_matrix"][-1], strict=True)) for run in runs]
    if missing := sorted({task for scores in last_rows for task, score in scores.items() if score is None}):
        notes.append(f"no score, and not in the means: {', '.join(missing)}")
    for label, row in content["methods"].items():
        notes += [f"{label} failed on {_seeds(failed)}: {reason}" for reason, failed in failures(row).items()]
    return notes


def finished(row: Json) -> dict[str, Json]:
    """Return the runs of a method that did not fail, by seed."""
    return {seed: run for seed, run in row["runs"].items() if run["accuracy_matrix"] is not None}


def _of_runs(row: Json, key: str) -> Mean:
    return Mean.of(run.get(key) for run in finished(row).values())


def failures(row: Json) -> dict[str, list[int]]:
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
    index = range(len(content["references"]), len(content["references"]) + len(compared))
    means = {
        name: [Mean.from_json(mean).mean if ok else math.nan for mean, ok in zip(means, compared, strict=True)]
        for name, means in columns.items()
    }
    return pd.DataFrame(means, index=index).round(3).rank(method="dense", ascending=False)


def _published(content: Json) -> dict[str, Json]:
    """Return the paper's numbers in per cent, by the names of all rows; empty for a row without any."""
    references = content.get("published_percent", {})
    return {label: references.get(label, {}) for label in content["references"]} | {
        label: row["published_percent"] for label, row in content["methods"].items()
    }


def _printed(row: Json, names: Sequence[str]) -> dict[str, str]:
    return {f"paper {name}": _printed_text(row, name) for name in names}


def _printed_text(row: Json, name: str) -> str:
    """The printed value of a metric or a task, in per cent, with its deviation, and a mark if it has a note."""
    if name not in row:
        return ""
    sign = "+" if name in METRICS and METRICS[name].signed else ""
    value, deviation = row[name]["value"], row[name]["deviation"]
    spread = "" if deviation is None else f" ± {deviation:.1f}"
    return f"{value:{sign}.1f}{spread}{_NOTED if row[name]['note'] else ''}"


def _printed_notes(printed: Mapping[str, Json], names: Sequence[str]) -> list[str]:
    """What is to be said about the printed numbers that are shown."""
    notes = (
        f"{_NOTED} the paper's {label}: {row[name]['note']}"
        for label, row in printed.items()
        for name in names
        if name in row and row[name]["note"]
    )
    return list(dict.fromkeys(notes))


def _printed_fractions(row: Json) -> Json:
    values = {f"paper_{name}": row[name]["value"] / 100 if name in row else None for name in ("ACC", "BWT")}
    return values | {"paper_note": row["ACC"]["note"] if "ACC" in row else None}


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
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ranges)
    return f"seed{'s' if len(numbers) > 1 else ''} {text}"
