"""The content of a comparison's ``results.json``, and the long table of its numbers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import pandas as pd

from fusion_bench_nufilt.utils.files import Score, Seconds

from .metrics import COSTS, METRICS, AccuracyMatrix, Mean
from .results import Row, long_table, means, rows_with, score_rows, single_model_rows

Json = dict[str, Any]
Scores = dict[str, Score | None]  # by task; None where there is none
References = dict[str, Scores]  # those of the single models, by ``pretrained`` or ``individual``

SINGLE_MODELS = ("pretrained", "individual")


def check_references(references: References, tasks: Sequence[str]) -> None:
    """Raise a ValueError unless each reference has all tasks, with or without a score."""
    for name in (*SINGLE_MODELS, *references):
        differing = set(references.get(name, ())) ^ set(tasks)
        if differing:
            raise ValueError(
                f"field '{name}': must have each task once, and '{min(differing)}' is too many or "
                "missing"
            )


@dataclass(frozen=True)
class SeedRun:
    """One method on one seed, with its scores or the reason why there are none, as its file holds
    it.
    """

    environment: dict[str, str] = field(default_factory=dict, kw_only=True)  # versions and device
    config: Json  # the method's, resolved
    tasks: list[str] | None = None  # as merged
    accuracy_matrix: list[list[Score | None]] | None = None
    merge_seconds: list[Seconds] = field(default_factory=list)  # by step
    #: The part of them that a solver took, if the method has one.
    solving_seconds: Seconds | None = None
    data_seconds: Seconds | None = None  # of setting up data, if the method needs any
    memory: int | None = None  # peak bytes while merging, see WatchingEvaluator
    parameters: int | None = None  # number in the final model
    extra_parameters: int | None = None  # number beyond the pretrained model's
    #: Tensors of the pretrained model that merging changed, and their share of its parameters.
    changed_tensors: int | None = None
    changed_share: float | None = None
    #: After the last step, of tasks without a score: metrics that are in no mean, as their scale
    #: is not known.
    unaveraged: dict[str, dict[str, float]] = field(default_factory=dict)
    error: str | None = None
    traceback: str | None = None

    def __post_init__(self) -> None:
        if self.error is None:
            AccuracyMatrix.from_rows(self.tasks or [], self.accuracy_matrix or [])

    @cached_property
    def matrix(self) -> AccuracyMatrix | None:
        if not self.tasks or not self.accuracy_matrix:
            return None
        return AccuracyMatrix.from_rows(self.tasks, self.accuracy_matrix)

    @property
    def merging_seconds(self) -> float:
        return sum(self.merge_seconds)

    @property
    def total_seconds(self) -> float:
        """Those of merging and of setting up data."""
        return self.merging_seconds + (self.data_seconds or 0.0)

    @property
    def iterations(self) -> int | None:
        """Steps of an optimiser at each merging step; None for a method without one."""
        # Without an adapter, and with its closed form, nothing is optimised.
        if self.config.get("lora_rank") == 0 or self.config.get("solver") == "closed_form":
            return None
        for options in (self.config, self.config.get("base_method") or {}):
            for name in ("max_steps", "iter_num", "num_steps"):
                if name in options:
                    steps: int = options[name]
                    return steps
        return None

    @property
    def missing(self) -> list[str]:
        """The tasks without a score after the last step."""
        return [] if self.matrix is None else self.matrix.missing

    def rows(self) -> list[Row]:
        """Return its scores, its costs and what it changed; a run that failed has none."""
        if self.matrix is None:
            return []
        rows = score_rows(self.matrix)
        for name in (*COSTS, "changed_tensors", "changed_share"):
            value = getattr(self, name)
            if value is not None:
                rows.append({"metric": name, "value": value})
        return rows


@dataclass(frozen=True)
class Method:
    """One method on all seeds, which differ in the order of the tasks."""

    overrides: list[str]
    runs: dict[int, SeedRun]  # by seed
    data: str = "none"  # the data that it needs besides models

    @property
    def finished(self) -> dict[int, SeedRun]:
        """The runs that did not fail, by seed."""
        return {seed: run for seed, run in self.runs.items() if run.matrix is not None}

    @property
    def failures(self) -> dict[str, list[int]]:
        """The seeds that failed, by the reason."""
        seeds: dict[str, list[int]] = {}
        for seed, run in self.runs.items():
            if run.error is not None:
                seeds.setdefault(run.error, []).append(seed)
        return seeds

    @property
    def complete(self) -> bool:
        return len(self.finished) == len(self.runs)

    @property
    def config(self) -> Json:
        """That of the first run that did not fail; empty if all failed."""
        for run in self.finished.values():
            return run.config
        return {}

    @property
    def options(self) -> list[str]:
        """The options that its overrides set, without ``method.``."""
        keys = [override.partition("=")[0] for override in self.overrides]
        return [key.removeprefix("method.") for key in keys if key.startswith("method.")]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The methods of a comparison on all seeds.

    All tables, pictures and the page are made of it.
    """

    settings: Json  # model pool, overrides, models, …, as in ``compare.json``
    #: Versions and devices that the runs were made with; several where they differ.
    environment: dict[str, str]
    preset: str | None = None  # of the methods, if any
    tasks: list[str]  # in the model pool's order
    seeds: list[int]
    references: References
    methods: dict[str, Method]  # by label, in the order in which they were asked for
    panels: list[Json] | None = None  # of the paper's sensitivity figure

    def __post_init__(self) -> None:
        check_references(self.references, self.tasks)
        if not self.methods or not self.seeds:
            raise ValueError("there is no run")
        for label, method in self.methods.items():
            if label in self.references:
                raise ValueError(f"field 'methods.{label}': single models have this name")
            for seed, run in method.runs.items():
                # Each seed has an order of its own of the same tasks.
                if run.error is None and sorted(run.tasks or ()) != sorted(self.tasks):
                    raise ValueError(
                        f"field 'methods.{label}.runs.{seed}.tasks': must be "
                        f"{', '.join(self.tasks)}"
                    )

    @property
    def labels(self) -> list[str]:
        """The names of all rows of a table, single models first."""
        return [*self.references, *self.methods]

    @property
    def orders(self) -> int:
        """How many orders of the tasks the runs had: few tasks have fewer orders than seeds."""
        orders = set()
        for method in self.methods.values():
            for run in method.finished.values():
                orders.add(tuple(run.tasks or ()))
        return len(orders)

    @property
    def stream(self) -> str:
        """What was merged, in words."""
        if len(self.tasks) == 1:
            return "1 model merged"
        return f"{len(self.tasks)} models merged one after another"

    def unaveraged(self, label: str, task: str) -> dict[str, Mean]:
        """Return the means over the seeds of what a task without a score has in place of it, by
        metric.
        """
        values: dict[str, list[float]] = {}
        if label in self.methods:
            for run in self.methods[label].finished.values():
                for metric, value in run.unaveraged.get(task, {}).items():
                    values.setdefault(metric, []).append(value)
        return {metric: Mean.of(numbers) for metric, numbers in values.items()}

    def missing_part(self, label: str, mean: Mean, metric: str = "") -> str:
        """Return such as ``2 of 3 tasks`` or ``9 of 10 seeds`` for the mean of a row that lacks
        scores, and nothing for one that has all.

        ``metric`` is one of :data:`~fusion_bench_nufilt.pages.metrics.METRICS`; without it, the
        mean is the score of a task. Of several seeds, the one with the fewest tasks counts.
        """
        if mean.count == 0:
            return ""
        if label in self.references:
            scores = list(self.references[label].values())
            counts = [(len(scores) - scores.count(None), len(scores))]
        else:
            matrices = [run.matrix for run in self.methods[label].finished.values() if run.matrix]
            if mean.count < len(matrices):
                return f"{mean.count} of {len(matrices)} seeds"
            counts = [matrix.task_counts()[metric or "ACC"] for matrix in matrices]
        scored_tasks, tasks = min(counts)
        if metric and scored_tasks < tasks:
            return f"{scored_tasks} of {tasks} tasks"
        return ""

    @property
    def scored(self) -> str:
        """The data on which the models were scored, in words."""
        words: str = self.settings["resolved"]["scored"]
        return words

    @property
    def done(self) -> dict[str, Method]:
        """The methods with at least one run that did not fail."""
        return {label: method for label, method in self.methods.items() if method.finished}

    def matrices(self, seed: int) -> dict[str, AccuracyMatrix]:
        """The matrices of the methods that finished a seed, whose task order all share."""
        matrices = {}
        for label, method in self.methods.items():
            matrix = method.runs[seed].matrix if seed in method.runs else None
            if matrix is not None:
                matrices[label] = matrix
        return matrices

    @property
    def failed(self) -> list[str]:
        """The methods whose runs all failed."""
        return [label for label in self.methods if label not in self.done]

    def curve(self, panel: Json) -> dict[str, Method]:
        """The methods of a panel, which set the options that it keeps fixed and then the one that
        it varies.
        """
        options = [*panel["fixed"], panel["key"]]
        return {label: method for label, method in self.done.items() if method.options == options}

    @cached_property
    def table(self) -> pd.DataFrame:
        """All numbers as rows of the long table."""
        about = {"modelpool": self.settings["modelpool"]}
        rows = []
        for label, scores in self.references.items():
            for row in single_model_rows(scores):
                rows.append({**about, "method": label, **row})
        for label, method in self.methods.items():
            for seed, run in method.runs.items():
                for row in run.rows():
                    rows.append({**about, "method": label, "seed": seed, **row})
        return long_table(rows)

    @property
    def last_scores(self) -> pd.DataFrame:
        """The scores after the last step, and those of the single models."""
        scores = rows_with(self.table, metric="score")
        return scores[scores["step"].isna() | (scores["step"] == len(self.tasks))]

    def as_json(self) -> Json:
        """Return the content of ``results.json``."""
        content = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        names = [*METRICS, "merging_seconds", "data_seconds", "changed_share"]
        metrics = means(self.table, "metric", list(self.methods), names)
        scores = means(self.last_scores, "task", list(self.methods), self.tasks)
        methods = {}
        for label, method in self.methods.items():
            row: Json = {"overrides": method.overrides, "data": method.data}
            for name in names:
                row[name] = metrics.loc[label, name].as_json()
            row["runs"] = {}
            for seed, run in method.runs.items():
                fields_of_run = asdict(run)
                # The run's own file has both, and the environments are joined into one above.
                del fields_of_run["environment"], fields_of_run["traceback"]
                row["runs"][str(seed)] = fields_of_run
            row["final"] = {task: scores.loc[label, task].as_json() for task in self.tasks}
            methods[label] = row
        content["methods"] = methods
        return {
            key: value for key, value in content.items() if value is not None or key == "preset"
        }
