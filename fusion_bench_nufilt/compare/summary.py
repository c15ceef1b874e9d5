"""The result of a comparison, made from its runs, saved and given to trackers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fusion_bench_nufilt.continual import METRICS
from fusion_bench_nufilt.continual.program import finish_trackers
from fusion_bench_nufilt.pages.content import Comparison, Json, Method, References, SeedRun
from fusion_bench_nufilt.pages.results import means, rows_with
from fusion_bench_nufilt.pages.write import write_results
from fusion_bench_nufilt.utils.files import write_json

from .presets import SENSITIVITY
from .specs import NEED_DATA, RunSpec


def compare_runs(
    settings: Json,
    tasks: list[str],
    seeds: list[int],
    references: References,
    runs: Mapping[RunSpec, Mapping[int, SeedRun]],
    preset: str | None = None,
) -> Comparison:
    """Return the runs of all methods, by seed."""
    methods = {}
    environments = []
    for spec, by_seed in runs.items():
        for run in by_seed.values():
            environments.append(run.environment)
        data = NEED_DATA.get(spec.method, "none")
        methods[spec.label] = Method(list(spec.overrides), dict(by_seed), data)
    panels = None
    if preset in ("sensitivity", "ranks"):
        panels = [{**panel, "fixed": list(panel["fixed"])} for panel in SENSITIVITY]
    return Comparison(
        settings=settings,
        environment=_joined(environments),
        preset=preset,
        tasks=tasks,
        seeds=seeds,
        references=references,
        methods=methods,
        panels=panels,
    )


def save_comparison(results: Comparison, folder: Path) -> list[str]:
    """Write ``results.json`` and its tables, pictures and page; return the files' names."""
    write_json(folder / "results.json", results.as_json())
    return ["results.json", *write_results(folder)]


def log_comparison(results: Comparison, loggers: Sequence[Any]) -> None:
    """Give trackers all scores by step, and with the last step the means."""
    by_step: dict[int, dict[str, float]] = {}
    scores = rows_with(results.table, metric="score", method=list(results.done)).dropna(
        subset="seed"
    )
    for row in scores.to_dict("records"):
        name = f"{row['method']}/seed {row['seed']:.0f}/{row['task']}"
        by_step.setdefault(int(row["step"]), {})[name] = row["value"]
    last_step = by_step.setdefault(len(results.tasks), {})
    metrics = means(results.table, "metric", list(results.done), list(METRICS))
    for label in results.done:
        for name in METRICS:
            mean = metrics.loc[label, name]
            if mean.count:
                last_step[f"{label}/{name}"] = mean.mean
    for step, numbers in by_step.items():
        for logger in loggers if numbers else ():
            logger.log_metrics(numbers, step=step)
    finish_trackers(loggers, "success")


def _joined(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the versions and devices of all runs, several where they differ."""
    table = pd.DataFrame(environments)
    return {name: " and ".join(table[name].dropna().unique()) for name in table}
