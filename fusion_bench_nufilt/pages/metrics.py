"""The accuracy matrix of a continual run, the metrics computed from it, and its JSON file."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusion_bench_nufilt.utils.files import write_json


def or_none(value: float) -> float | None:
    """Return a value as JSON can hold it: None for NaN, anything else as it is."""
    return None if isinstance(value, float) and math.isnan(value) else value


def percent(value: float, *, sign: bool = False) -> str:
    """Return a fraction as text, in per cent with one decimal; ``-`` for NaN."""
    if math.isnan(value):
        return "-"
    return f"{100 * value:+.1f}" if sign else f"{100 * value:.1f}"


@dataclass(frozen=True)
class Mean:
    """The mean and the sample standard deviation (n - 1), of fewer than two values NaN."""

    mean: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Mean":
        """Leave out what is no number; without any, the mean is NaN."""
        numbers = np.array(
            [value for value in values if value is not None and not math.isnan(value)]
        )
        mean = float(numbers.mean()) if numbers.size else math.nan
        return cls(mean, float(numbers.std(ddof=1)) if numbers.size > 1 else math.nan, numbers.size)

    def percent(self, *, sign: bool = False) -> str:
        """Return fractions as words such as ``75.7 ± 0.3``, a single one as ``75.7``, and none as
        ``-``.
        """
        mean = percent(self.mean, sign=sign)
        return mean if math.isnan(self.std) else f"{mean} ± {percent(self.std)}"

    def as_json(self) -> dict[str, float | int | None]:
        return {"mean": or_none(self.mean), "std": or_none(self.std), "count": self.count}


class AccuracyMatrix:
    r"""Scores :math:`a_i(\theta_t)` of T tasks i, in merging order, after step t; NaN where not
    measured.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        self.tasks = list(tasks)
        #: ``(T, T)``, row t-1 after step t, column i-1 for task i; fractions, not per cent
        self.values: NDArray[np.float64] = np.full((len(self.tasks), len(self.tasks)), math.nan)

    @classmethod
    def from_rows(
        cls, tasks: Sequence[str], rows: Sequence[Sequence[float | None]]
    ) -> "AccuracyMatrix":
        """Make a matrix of all scores; a ValueError if they are not T rows of T scores, or if a
        task comes twice.
        """
        if not tasks or len(set(tasks)) < len(tasks):
            raise ValueError(f"field 'tasks': must be names that differ, got {list(tasks)}")
        if {len(rows), *map(len, rows)} != {len(tasks)}:
            raise ValueError(
                f"field 'accuracy_matrix': must have {len(tasks)} rows of {len(tasks)} scores"
            )
        matrix = cls(tasks)
        matrix.values[:] = np.array(rows, dtype=float)  # None is NaN
        return matrix

    def rows(self) -> list[list[float | None]]:
        """Return :attr:`values` for JSON, which knows no NaN."""
        return [[or_none(value) for value in row] for row in self.values.tolist()]

    @property
    def percents(self) -> list[list[float]]:
        percents: list[list[float]] = (100 * self.values).tolist()
        return percents

    def record(self, step: int, scores: dict[str, float]) -> None:
        """Enter the scores of some tasks after a step (from 1); a score that is not a number stays
        missing.
        """
        for task, score in scores.items():
            self.values[step - 1, self.tasks.index(task)] = score

    @property
    def steps(self) -> list[str]:
        """The steps as words, such as ``1 + mnist``."""
        return [f"{step} + {task}" for step, task in enumerate(self.tasks, 1)]

    @property
    def missing(self) -> list[str]:
        return [
            task
            for task, score in zip(self.tasks, self.values[-1], strict=True)
            if math.isnan(score)
        ]

    def metrics(self) -> dict[str, float]:
        """Return every metric of :data:`METRICS`; NaN where it could not be measured."""
        return {name: metric.of(self) for name, metric in METRICS.items()}

    def summary(self) -> str:
        """Return the headline metrics in one line, in per cent, with a note on missing scores."""
        found = [
            (name, metric, metric.of(self)) for name, metric in METRICS.items() if metric.headline
        ]
        texts = [
            f"{name} {percent(value, sign=row.signed)}"
            for name, row, value in found
            if not math.isnan(value)
        ]
        line, missing, count = "   ".join(texts) or "no score", self.missing, len(self.tasks)
        if 0 < len(missing) < count:
            line += (
                f"   ({count - len(missing)} of {count} tasks; no score for {', '.join(missing)})"
            )
        return line

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Write ``accuracy_matrix.json``: ``about``, and the scores as fractions; a missing one is
        null.
        """
        metrics = {name: or_none(value) for name, value in self.metrics().items()}
        scores = {
            "tasks": self.tasks,
            "accuracy_matrix": self.rows(),
            **metrics,
            "missing": self.missing,
        }
        write_json(folder / "accuracy_matrix.json", {**about, **scores})

    @property
    def acc(self) -> float:
        r"""ACC :math:`= \operatorname{mean}_i a_i(\theta_T)` over the tasks that have a final
        score, else NaN.
        """
        return Mean.of(self.values[-1]).mean

    @property
    def plasticity(self) -> float:
        r"""Mean score of each task right after its own step, :math:`\operatorname{mean}_i
        a_i(\theta_i)`, else NaN.
        """
        return Mean.of(np.diagonal(self.values)).mean

    @property
    def mean_seen(self) -> NDArray[np.float64]:
        """``(T,)``: after each step, the mean score of the tasks merged so far; NaN unless all of
        them were scored.

        Tasks that never get a score, because the task pool lacks them, do not count.
        """
        scored = ~np.isnan(self.values[-1])
        seen = [row[:step][scored[:step]] for step, row in enumerate(self.values, 1)]
        return np.array([values.mean() if values.size else math.nan for values in seen])

    @property
    def fwt(self) -> float:
        r"""FWT :math:`= \operatorname{mean}_{i<T} \operatorname{mean}_{j>i} a_j(\theta_i)`, else
        NaN.

        This is the mean score of tasks that are still to come; the paper announces forward transfer
        but prints none.
        """
        ahead = [Mean.of(row[step:]).mean for step, row in enumerate(self.values[:-1], 1)]
        return float(np.mean(ahead)) if ahead else math.nan

    @property
    def bwt(self) -> float:
        r"""BWT :math:`= \frac{1}{T-1} \sum_{i<T} [a_i(\theta_T) - a_i(\theta_i)]` of tasks with
        both, else NaN.
        """
        return Mean.of((self.values[-1] - np.diagonal(self.values))[:-1]).mean


class Metric(NamedTuple):
    """A number computed from an accuracy matrix, as a fraction."""

    of: Callable[[AccuracyMatrix], float]
    meaning: str
    signed: bool = False  # whether it is shown with its sign, as a difference is
    headline: bool = True  # whether tables and the line below a matrix show it; files have all


#: What files, tables and loggers report of every run.
METRICS = {
    "ACC": Metric(lambda matrix: matrix.acc, "the mean score over all tasks after the last step"),
    "BWT": Metric(
        lambda matrix: matrix.bwt,
        "backward transfer, the mean change of a task's score from its own step to the last one; "
        "below zero, tasks are forgotten",
        signed=True,
    ),
    "FWT": Metric(
        lambda matrix: matrix.fwt,
        "forward transfer, the mean score over the steps of the tasks that are still to come",
    ),
    "plasticity": Metric(
        lambda matrix: matrix.plasticity,
        "the mean score of each task right after its own step",
        headline=False,
    ),
}
