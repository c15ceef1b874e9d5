"""Means and standard deviations over the seeds."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusion_bench_nufilt.continual import METRICS, AccuracyMatrix
from fusion_bench_nufilt.results.matrix import percent
from fusion_bench_nufilt.results.metrics import or_none

from .paper import Published, paper_settings, published
from .specs import NEED_DATA, RunSpec
from .store import References, Run

_ITERATIONS = ("max_steps", "iter_num", "num_steps")  # what methods call them


@dataclass(frozen=True)
class Mean:
    """Mean and sample standard deviation (n - 1); NaN without values, and no deviation for fewer than two."""

    mean: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Mean":
        """Of those values that are numbers."""
        numbers = np.array([value for value in values if not math.isnan(value)])
        mean = float(numbers.mean()) if numbers.size else math.nan
        return cls(mean, float(numbers.std(ddof=1)) if numbers.size > 1 else math.nan, numbers.size)

    def percent(self, *, sign: bool = False) -> str:
        """``75.7 ± 0.3`` of fractions, ``75.7`` of a single one, ``-`` of none."""
        return percent(self.mean, sign=sign) + ("" if math.isnan(self.std) else f" ± {percent(self.std)}")

    def as_json(self) -> dict[str, float | int | None]:
        """For JSON, which knows no NaN."""
        return {"mean": or_none(self.mean), "std": or_none(self.std), "count": self.count}


@dataclass(frozen=True)
class MethodResult:
    """One method on all seeds. The seeds differ in the order of the tasks; what is averaged over them is said below."""

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

    @cached_property
    def solving_seconds(self) -> Mean:
        """Seconds of these in the solver; NaN for a method without one."""
        return Mean.of(run.solving_seconds for run in self.runs if run.solving_seconds is not None)

    @cached_property
    def memory(self) -> Mean:
        """Most bytes in use while merging; NaN where that can't be known."""
        return Mean.of(float(run.memory) for run in self.runs if run.memory is not None)

    @property
    def parameters(self) -> int | None:
        """Of the final model, whatever the seed; None if that is not known."""
        return next((run.parameters for run in self.runs if run.parameters is not None), None)

    @property
    def iterations(self) -> int | None:
        """Steps of an optimiser at each merging step; None for a method without one."""
        config = next((run.config for run in self.runs if run.matrix is not None), {})
        if config.get("lora_rank") == 0 or config.get("solver") == "closed_form":
            return None
        places = (config, config.get("base_method") or {})
        return next((place[key] for place in places for key in _ITERATIONS if key in place), None)

    @property
    def extra_parameters(self) -> int | None:
        """Of the final model, beyond those of the pretrained one, whatever the seed; None if that is not known."""
        return next((run.extra_parameters for run in self.runs if run.extra_parameters is not None), None)

    @property
    def data(self) -> str:
        """What it needs beside models: ``none``, ``training`` or ``test`` (without labels)."""
        return NEED_DATA.get(self.spec.method, "none")

    def final(self, task: str) -> Mean:
        """Score of a task after the last step. Each order has its own last row; the task is found in it by name."""
        return Mean.of(float(matrix.values[-1, matrix.tasks.index(task)]) for matrix in self.matrices)

    @cached_property
    def mean_seen(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """``(T,)`` each: mean and deviation, by step, of the mean score of the tasks seen so far.

        Over orders, step t is the mean over t tasks that are not the same t tasks in every order.
        """
        means = [Mean.of(column) for column in zip(*(matrix.mean_seen for matrix in self.matrices), strict=True)]
        return np.array([mean.mean for mean in means]), np.array([mean.std for mean in means])

    def setting(self, key: str) -> Any:
        """A value of the method's configuration."""
        return self.runs[0].config.get(key)


@dataclass(frozen=True)
class Comparison:
    """All that tables and pictures are made of.

    Args:
        settings: model pool, overrides, models, …, as in ``compare.json``.
        tasks: in the model pool's order.
        seeds: of the comparison.
        references: scores of the single models.
        methods: in the order in which they were asked for.
        preset: that the methods come from, if any.
    """

    settings: dict[str, Any]
    tasks: list[str]
    seeds: list[int]
    references: References
    methods: list[MethodResult]
    preset: str | None = None

    def reference(self, label: str) -> float:
        """Mean score of ``pretrained`` or ``individual`` over the tasks that have one."""
        return Mean.of(self.references[label].values()).mean

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
