"""The result of a comparison, made from its runs, saved and given to trackers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fusion_bench_nufilt.continual import METRICS
from fusion_bench_nufilt.continual.program import finish_trackers, log_picture
from fusion_bench_nufilt.pages.content import Comparison, Json, Method, References, SeedRun
from fusion_bench_nufilt.pages.results import means, rows_with
from fusion_bench_nufilt.pages.write import write_results
from fusion_bench_nufilt.utils.files import write_json

from .paper import SENSITIVITY, as_published, printed_for_method, printed_numbers, published
from .specs import NEED_DATA, RunSpec

_OVERHEAD_POOL = "clip-vit-base-patch32_TA8"  # the models that the paper's table of costs is for


def compare_runs(
    settings: Json,
    tasks: list[str],
    seeds: list[int],
    references: References,
    runs: Mapping[RunSpec, Mapping[int, SeedRun]],
    preset: str | None = None,
) -> Comparison:
    """Return the runs of all methods, by seed, beside what the paper prints for them."""
    validation = settings.get("resolved", {}).get("validation")
    modelpool = settings["modelpool"]
    numbers, note = published(modelpool, settings["overrides"], seeds, validation)
    methods = {}
    environments = []
    for spec, by_seed in runs.items():
        form = None
        for run in by_seed.values():
            environments.append(run.environment)
            # A method that could not be built has runs without a configuration.
            form = form or run.config.get("form")
        printed = printed_for_method(spec, form, modelpool, numbers)
        data = NEED_DATA.get(spec.method, "none")
        methods[spec.label] = Method(
            list(spec.overrides), dict(by_seed), data, as_published(printed)
        )
    panels = None
    if preset in ("sensitivity", "ranks"):
        panels = [{**panel, "fixed": list(panel["fixed"])} for panel in SENSITIVITY]
    overhead = None
    if preset == "overhead":
        costs = rows_with(printed_numbers(), table="overhead", modelpool=_OVERHEAD_POOL)
        overhead = {}
        for method, rows in costs.groupby("method", sort=False):
            overhead[method] = as_published(rows)
    single_models = {}
    for name in references:
        rows = rows_with(numbers, method=name)
        if len(rows):
            single_models[name] = as_published(rows)
    return Comparison(
        settings=settings,
        environment=_joined(environments),
        preset=preset,
        tasks=tasks,
        seeds=seeds,
        references=references,
        published_percent=single_models,
        published_note=note,
        methods=methods,
        panels=panels,
        published_overhead=overhead,
    )


def save_comparison(results: Comparison, folder: Path) -> list[str]:
    """Write ``results.json`` and its tables, pictures and page; return the files' names."""
    write_json(folder / "results.json", results.as_json())
    return ["results.json", *write_results(folder)]


def log_comparison(results: Comparison, loggers: Sequence[Any], pictures: Sequence[Path]) -> None:
    """Give trackers all scores by step, and with the last step means and pictures."""
    by_step: dict[int, dict[str, float]] = {}
    scores = rows_with(results.measured, metric="score", method=list(results.done)).dropna(
        subset="seed"
    )
    for row in scores.to_dict("records"):
        name = f"{row['method']}/seed {row['seed']:.0f}/{row['task']}"
        by_step.setdefault(int(row["step"]), {})[name] = row["value"]
    last_step = by_step.setdefault(len(results.tasks), {})
    metrics = means(results.measured, "metric", list(results.done), list(METRICS))
    for label in results.done:
        for name in METRICS:
            mean = metrics.loc[label, name]
            if mean.count:
                last_step[f"{label}/{name}"] = mean.mean
    for step, numbers in by_step.items():
        for logger in loggers if numbers else ():
            logger.log_metrics(numbers, step=step)
    for picture in pictures:
        log_picture(loggers, picture.stem, picture, len(results.tasks))
    finish_trackers(loggers, "success")


def _joined(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the versions and devices of all runs, several where they differ."""
    table = pd.DataFrame(environments)
    return {name: " and ".join(table[name].dropna().unique()) for name in table}
