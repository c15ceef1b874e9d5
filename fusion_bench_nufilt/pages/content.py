"""The content of a comparison's ``results.json``."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from fusion_bench_nufilt.utils.schemas import Score, Seconds

from .metrics import METRICS, AccuracyMatrix, Mean

Json = dict[str, Any]
Published = dict[str, Json]  # the paper's numbers for a row, in per cent, by metric or task
Scores = dict[str, Score | None]  # by task; None where there is none
References = dict[str, Scores]  # those of the single models, by ``pretrained`` or ``individual``


def check_references(references: References, tasks: Sequence[str]) -> None:
    """Raise a ValueError unless each reference has all tasks, with or without a score."""
    for name in ("pretrained", "individual", *references):
        if other := set(references.get(name, ())) ^ set(tasks):
            raise ValueError(
                f"field '{name}': must have each task once, and '{min(other)}' is too many or "
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
    solving_seconds: Seconds | None = (
        None  # the part of them that a solver took, if the method has one
    )
    memory: int | None = None  # peak bytes while merging, see WatchingEvaluator
    parameters: int | None = None  # number in the final model
    extra_parameters: int | None = None  # number beyond the pretrained model's
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


@dataclass(frozen=True)
class Method:
    """One method on all seeds, which differ in the order of the tasks."""

    overrides: list[str]
    runs: dict[int, SeedRun]  # by seed
    data: str = "none"  # the data that it needs besides models
    published_percent: Published = field(default_factory=dict)

    @cached_property
    def matrices(self) -> dict[int, AccuracyMatrix]:
        """Those of the runs that did not fail, by seed."""
        return {seed: run.matrix for seed, run in self.runs.items() if run.matrix is not None}

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
        return len(self.matrices) == len(self.runs)

    @property
    def config(self) -> Json:
        """That of the first run that did not fail; empty if all failed."""
        return next((self.runs[seed].config for seed in self.matrices), {})

    @property
    def iterations(self) -> int | None:
        """Steps of an optimiser at each merging step; None for a method without one."""
        if self.config.get("lora_rank") == 0 or self.config.get("solver") == "closed_form":
            return None
        names = ("max_steps", "iter_num", "num_steps")
        places = (self.config, self.config.get("base_method") or {})
        return next((place[name] for place in places for name in names if name in place), None)

    def known(self, name: str) -> Any:
        """Return a field of the first run that has it; None if there is none."""
        return next(
            (value for run in self.runs.values() if (value := getattr(run, name)) is not None), None
        )

    def mean(self, name: str) -> Mean:
        """Return the mean of a metric, or of a field of the runs, over those that did not fail."""
        if name in METRICS:
            return Mean.of(METRICS[name].of(matrix) for matrix in self.matrices.values())
        return Mean.of(getattr(self.runs[seed], name) for seed in self.matrices)

    def words(self, mean: Mean, *, sign: bool = False) -> str:
        """Return one of these means in per cent; ``failed`` if all runs did."""
        return mean.percent(sign=sign) if self.matrices else "failed"

    def final(self, task: str) -> Mean:
        """Return the mean score of a task after the last step, wherever the orders have it."""
        return Mean.of(
            float(matrix.values[-1, matrix.tasks.index(task)]) for matrix in self.matrices.values()
        )

    def as_json(self, tasks: Sequence[str]) -> Json:
        runs = {str(seed): asdict(run) for seed, run in self.runs.items()}
        for run in runs.values():
            del run["environment"], run["traceback"]
        return {
            "overrides": self.overrides,
            **{name: self.mean(name).as_json() for name in (*METRICS, "merging_seconds")},
            "iterations": self.iterations,
            "extra_parameters": self.known("extra_parameters"),
            "data": self.data,
            "runs": runs,
            "final": {task: self.final(task).as_json() for task in tasks},
            "published_percent": self.published_percent,
        }


@dataclass(frozen=True, kw_only=True)
class ComparisonContent:
    """All that tables, pictures and the page are made of."""

    settings: Json  # model pool, overrides, models, …, as in ``compare.json``
    environment: dict[
        str, str
    ]  # versions and devices that the runs were made with; several where they differ
    preset: str | None = None  # of the methods, if any
    tasks: list[str]  # in the model pool's order
    seeds: list[int]
    references: References
    published_percent: dict[str, Published] = field(default_factory=dict)  # for the references
    published_note: str = ""  # why numbers that the paper prints for the model pool are not shown
    methods: dict[str, Method]  # by label, in the order in which they were asked for
    panels: list[Json] | None = None  # of the paper's sensitivity figure
    published_overhead: dict[str, Published] | None = None  # the paper's table of costs

    def __post_init__(self) -> None:
        check_references(self.references, self.tasks)
        if not self.methods or not self.seeds:
            raise ValueError("there is no run")
        for label, method in self.methods.items():
            for seed, run in method.runs.items():
                if run.error is None and sorted(run.tasks or ()) != sorted(self.tasks):
                    raise ValueError(
                        f"field 'methods.{label}.runs.{seed}.tasks': must be "
                        f"{', '.join(self.tasks)}"
                    )

    @property
    def scored(self) -> str:
        """The data on which the models were scored."""
        validation = self.settings.get("resolved", {}).get("validation")
        if validation is None:
            return "all test data"
        return (
            "a fifth of the test data"
            if validation
            else "the test data without the fifth of --validation"
        )

    @property
    def curves(self) -> dict[str, dict[str, Method]]:
        """The methods of each panel, by its symbol and their labels."""
        curves = {}
        for panel in self.panels or ():
            start = f"{panel['symbol']} "
            curves[panel["symbol"]] = {
                label: row for label, row in self.done.items() if label.startswith(start)
            }
        return curves

    @property
    def done(self) -> dict[str, Method]:
        """The methods with at least one run that did not fail."""
        return {label: method for label, method in self.methods.items() if method.matrices}

    @property
    def first_seed(self) -> dict[str, AccuracyMatrix]:
        """The matrices of the first seed, by method; all have the same task order."""
        seed = self.seeds[0]
        return {
            label: method.matrices[seed]
            for label, method in self.methods.items()
            if seed in method.matrices
        }

    @property
    def printed(self) -> dict[str, Published]:
        """The paper's numbers for every row; empty for a row without any."""
        references = {label: self.published_percent.get(label, {}) for label in self.references}
        return references | {
            label: method.published_percent for label, method in self.methods.items()
        }

    def as_json(self) -> Json:
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        content["methods"] = {
            label: method.as_json(self.tasks) for label, method in self.methods.items()
        }
        return {
            name: value for name, value in content.items() if value is not None or name == "preset"
        }
