"""Means and standard deviations over the seeds."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fusion_bench_nufilt.continual import METRICS, AccuracyMatrix
from fusion_bench_nufilt.continual.program import log_picture
from fusion_bench_nufilt.results.metrics import Mean, or_none
from fusion_bench_nufilt.results.write import write_results
from fusion_bench_nufilt.storage.files import write_text

from .paper import Published, paper_settings, printed_tables, published
from .presets import SENSITIVITY
from .specs import NEED_DATA, RunSpec
from .store import References, Run

_ITERATIONS = ("max_steps", "iter_num", "num_steps")  # what methods call them
_OVERHEAD = ("overhead", "clip-vit-base-patch32_TA8")  # the paper's table of costs, and the models that it is for


@dataclass(frozen=True)
class MethodResult:
    """One method on all seeds, which differ in the order of the tasks."""

    spec: RunSpec
    runs: list[Run]  # by seed

    @cached_property
    def matrices(self) -> list[AccuracyMatrix]:
        """Of the runs that did not fail."""
        return [run.matrix for run in self.runs if run.matrix is not None]

    @property
    def failures(self) -> dict[str, list[int]]:
        """Reasons and the seeds that failed for them."""
        reasons: dict[str, list[int]] = {}
        for run in self.runs:
            if run.error is not None:
                reasons.setdefault(run.error, []).append(run.seed)
        return reasons

    @cached_property
    def metrics(self) -> dict[str, Mean]:
        """Each of :data:`fusion_bench_nufilt.continual.METRICS` over the runs that did not fail."""
        return {name: Mean.of(metric.of(matrix) for matrix in self.matrices) for name, metric in METRICS.items()}

    @cached_property
    def seconds(self) -> Mean:
        """Seconds of merging all models, without loading and scoring."""
        return Mean.of(sum(run.merge_seconds) for run in self.runs if run.matrix is not None)

    @property
    def iterations(self) -> int | None:
        """Steps of an optimiser at each merging step; None for a method without one."""
        config = next((run.config for run in self.runs if run.matrix is not None), {})
        if config.get("lora_rank") == 0 or config.get("solver") == "closed_form":
            return None
        places = (config, config.get("base_method") or {})
        return next((place[key] for place in places for key in _ITERATIONS if key in place), None)

    def final(self, task: str) -> Mean:
        """Score of a task after the last step. Each order has its own last row; the task is found in it by name."""
        return Mean.of(float(matrix.values[-1, matrix.tasks.index(task)]) for matrix in self.matrices)

    def as_json(self) -> dict[str, Any]:
        """Return what ``results.json`` holds of the method."""
        extra = (run.extra_parameters for run in self.runs if run.extra_parameters is not None)  # whatever the seed
        elsewhere = ("seed", "environment", "traceback")
        return {
            "overrides": list(self.spec.overrides),
            **{name: mean.as_json() for name, mean in self.metrics.items()},
            "merging_seconds": self.seconds.as_json(),
            "iterations": self.iterations,
            "extra_parameters": next(extra, None),
            "data": NEED_DATA.get(self.spec.method, "none"),
            "runs": {
                str(run.seed): {key: value for key, value in asdict(run).items() if key not in elsewhere}
                for run in self.runs
            },
        }


@dataclass(frozen=True)
class Comparison:
    """All that tables and pictures are made of."""

    settings: dict[str, Any]  # model pool, overrides, models, …, as in ``compare.json``
    tasks: list[str]  # in the model pool's order
    seeds: list[int]
    references: References
    methods: list[MethodResult]  # in the order in which they were asked for
    preset: str | None = None  # that the methods come from, if any

    @cached_property
    def published(self) -> dict[str, Published]:
        """The paper's numbers for the same models and setting, by the rows' labels."""
        modelpool = self.settings["modelpool"]
        rows = published(modelpool, self.settings["overrides"], self.seeds)
        settings = paper_settings(modelpool)
        found = {label: rows[label] for label in self.references if label in rows}
        for spec in (method.spec for method in self.methods):
            given = tuple(setting for setting in spec.settings if not setting.startswith("form="))  # beside either form
            as_printed = given == settings.get(spec.method, ())
            row = spec.method if as_printed else ":".join((spec.method, *given))
            if row in rows:
                found[spec.label] = rows[row]
        return found

    @property
    def finished(self) -> list[MethodResult]:
        """Methods with at least one run that did not fail."""
        return [method for method in self.methods if method.matrices]

    @property
    def environments(self) -> dict[str, str]:
        """Versions and devices that the runs were made with; several where they differ."""
        found: dict[str, dict[str, None]] = {}
        for method in self.methods:
            for run in method.runs:
                for key, value in run.environment.items():
                    found.setdefault(key, {})[value] = None
        return {key: " and ".join(values) for key, values in found.items()}

    def as_json(self) -> dict[str, Any]:
        """Return all numbers, and those that the paper prints for the same."""
        printed = _as_json(self.published)
        content: dict[str, Any] = {
            "settings": self.settings,
            "environment": self.environments,
            "preset": self.preset,
            "tasks": self.tasks,
            "seeds": self.seeds,
            "references": self.references,
            "published_percent": {label: printed[label] for label in self.references if label in printed},
            "methods": {
                method.spec.label: method.as_json()
                | {
                    "final": {task: method.final(task).as_json() for task in self.tasks},
                    "published_percent": printed.get(method.spec.label, {}),
                }
                for method in self.methods
            },
        }
        if self.preset == "sensitivity":
            content["panels"] = [{**panel._asdict(), "fixed": list(panel.fixed)} for panel in SENSITIVITY]
        if self.preset == "overhead":
            content["published_overhead"] = _as_json(printed_tables()[_OVERHEAD])
        return content

    def save(self, folder: Path) -> list[str]:
        """Write ``results.json`` and the tables, pictures and page that are made of it; return the files' names."""
        write_text(folder / "results.json", json.dumps(self.as_json(), indent=2))
        return ["results.json", *write_results(folder)]

    def log(self, loggers: Sequence[Any], pictures: Sequence[Path]) -> None:
        """Give trackers all scores of every method and seed by step, and at the last one the means and the pictures."""
        by_step: dict[int, dict[str, float | None]] = defaultdict(dict)
        for method in self.finished:
            for run in method.runs:
                for step, row in enumerate(run.accuracy_matrix or (), 1):
                    names = (f"{method.spec.label}/seed {run.seed}/{task}" for task in run.tasks or ())
                    by_step[step] |= zip(names, row, strict=True)
            means = {f"{method.spec.label}/{name}": or_none(mean.mean) for name, mean in method.metrics.items()}
            by_step[len(self.tasks)] |= means
        for step, scores in by_step.items():
            known = {name: score for name, score in scores.items() if score is not None}
            for logger in loggers if known else ():
                logger.log_metrics(known, step=step)
        for picture in pictures:
            log_picture(loggers, picture.stem, picture, len(self.tasks))
        for logger in loggers:
            logger.finalize("success")


def _as_json(published: Mapping[str, Published]) -> dict[str, dict[str, Any]]:
    return {label: {name: number._asdict() for name, number in row.items()} for label, row in published.items()}
