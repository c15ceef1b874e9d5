"""What is measured: the accuracy matrix of a continual run, and the names of all metrics."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusion_bench_nufilt.utils.files import write_json


class Metric(NamedTuple):
    """What a number of the long table says, and how it is shown."""

    title: str
    unit: float = 1.0  # what is counted where it is shown, such as 10**9 bytes
    signed: bool = False  # whether it is shown with its sign, as a difference is
    headline: bool = False  # whether tables and the line below a matrix show it; files have all
    meaning: str = ""  # for readers who do not know its name
    #: What is above zero in the steps that have such a thing: of others, there is no number.
    presence: str = ""

    @property
    def word(self) -> str:
        """Its name in a sentence."""
        return self.title.removesuffix(" %")


#: What scores are of, unless a part of the data is asked for.
ALL_TEST_DATA = "all test data"

#: What files, tables and loggers report of every run, computed from its accuracy matrix. All are
#: fractions, and shown in per cent.
METRICS = {
    "ACC": Metric(
        "ACC %",
        headline=True,
        meaning="the mean score over all tasks after the last step",
    ),
    "BWT": Metric(
        "BWT %",
        signed=True,
        headline=True,
        meaning="backward transfer, the mean change of a task's score from its own step to the "
        "last one; below zero, tasks are forgotten",
    ),
    "zero_shot": Metric(
        "zero-shot %",
        headline=True,
        meaning="the mean score of the tasks that are still to come, over the steps",
    ),
    "plasticity": Metric(
        "each task right after its step %",
        meaning="the mean score of each task right after its own step",
    ),
}
#: Those that tables show.
HEADLINE = [name for name, metric in METRICS.items() if metric.headline]
#: What a run costs.
COSTS = {
    "iterations": Metric("iterations"),
    "solving_seconds": Metric("solving s"),
    "merging_seconds": Metric("merging s"),
    "data_seconds": Metric("data set-up s"),
    "total_seconds": Metric("total s"),
    "memory": Metric("memory GB", unit=1e9),
    "parameters": Metric("parameters M", unit=1e6),
    "extra_parameters": Metric("extra params"),
}
#: What a method measures of a layer at a step, the columns of ``layers.csv`` that are drawn.
LAYER_METRICS = {
    "filtered_share": Metric("share filtered", presence="protected_rank"),
    "overlap": Metric("overlap of subspaces", presence="protected_rank"),
    "loss_before": Metric("data-free loss before the adapter", presence="merged_norm"),
    "loss_after": Metric("data-free loss after it", presence="merged_norm"),
    "task_norm": Metric("norm of task vectors"),
    "merged_norm": Metric("norm of what was merged before", presence="merged_norm"),
}
#: What an analysis measures of a layer, mean over the tasks or over pairs of them.
LAYER_MEANS = {
    "effective_rank": "effective rank, mean over the tasks",
    "overlap": "overlap of two task vectors, mean over pairs",
    "matched_affinity": "affinity, matched",
    "mismatched_affinity": "affinity, mismatched",
}


def scored_on(data: str, *, one_batch: bool) -> str:
    """Return what scores are of, in the words that results have as ``scored``: ``data``, or one
    batch of them.
    """
    if not one_batch:
        return data
    words = "one batch of each task's test data (fast_dev_run=true)"
    return words if data == ALL_TEST_DATA else f"{words}, of {data}"


def has_quantity(name: str, report: Mapping[str, Any]) -> bool:
    """Tell whether a step had what a number of its report is of: the first one has no filter."""
    if name not in report:  # as in rows that were read from a damaged file
        return False
    metric = LAYER_METRICS.get(name)
    return metric is None or report.get(metric.presence, 1) > 0


def or_none(value: float) -> float | None:
    """Return a value as JSON can hold it: None for NaN, anything else as it is."""
    if isinstance(value, float) and math.isnan(value):
        return None
    return value


def as_shown(value: float) -> float:
    """Return the number that :func:`percent` shows of a fraction; NaN stays NaN."""
    if math.isnan(value):
        return value
    return float(percent(value))


def shown_number(value: float, digits: int = 1) -> str:
    """Return a number with ``digits`` decimals, one that would be 0 with its first two digits, such
    as ``0.013``, a whole number as it is, and ``-`` for none.
    """
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "-"
    if 0 < abs(value) < 10**-digits:
        return f"{value:.2g}"
    return f"{value:.{digits}f}"


def percent(value: float, *, sign: bool = False) -> str:
    """Return a fraction as text, in per cent with one decimal; ``-`` for NaN."""
    if math.isnan(value):
        return "-"
    if sign:
        return f"{100 * value:+.1f}"
    return f"{100 * value:.1f}"


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
        mean = std = math.nan
        if len(numbers) > 0:
            mean = float(numbers.mean())
        if len(numbers) > 1:
            std = float(numbers.std(ddof=1))
        return cls(mean, std, len(numbers))

    def percent(self, *, sign: bool = False) -> str:
        """Return fractions as words such as ``75.7 ± 0.3``, a single one as ``75.7``, and none as
        ``-``.
        """
        mean = percent(self.mean, sign=sign)
        if math.isnan(self.std):
            return mean
        return f"{mean} ± {percent(self.std)}"

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
        rows = []
        for scores in self.values.tolist():
            rows.append([or_none(score) for score in scores])
        return rows

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
        """The tasks without a score after the last step."""
        last = zip(self.tasks, self.values[-1], strict=True)
        return [task for task, score in last if math.isnan(score)]

    def metrics(self) -> dict[str, float]:
        """Return every metric of :data:`METRICS`; NaN where it could not be measured."""
        metrics = {}
        for name, values in self._task_values().items():
            metrics[name] = Mean.of(values).mean
        # Each step counts the same, however many tasks are still to come.
        ahead = [Mean.of(scores[step:]).mean for step, scores in enumerate(self.values[:-1], 1)]
        metrics["zero_shot"] = float(np.mean(ahead)) if ahead else math.nan
        return metrics

    def task_counts(self) -> dict[str, tuple[int, int]]:
        """Return for every metric of how many tasks it is the mean, and of how many with all
        scores.
        """
        counts = {}
        for name, values in self._task_values().items():
            counts[name] = (int(np.isfinite(values).sum()), len(values))
        return counts

    def _task_values(self) -> dict[str, NDArray[np.float64]]:
        r"""Return the numbers of tasks of which metrics are means, NaN where there is none.

        They are :math:`a_i(\theta_T)`, and without the last task, whose own step is the last one,
        :math:`a_i(\theta_T) - a_i(\theta_i)`; the mean of :math:`a_i` before step i; and
        :math:`a_i(\theta_i)`.
        """
        last = self.values[-1]
        own = np.diagonal(self.values)
        before = [self.values[:step, step].mean() for step in range(1, len(self.tasks))]
        return {
            "ACC": last,
            "BWT": (last - own)[:-1],
            "zero_shot": np.array(before),
            "plasticity": own,
        }

    def summary(self) -> str:
        """Return the headline metrics in one line, in per cent, with a note on missing scores."""
        metrics = self.metrics()
        texts = []
        for name in HEADLINE:
            if not math.isnan(metrics[name]):
                texts.append(f"{METRICS[name].word} {self.shown(name)}")
        line = "   ".join(texts) or "no score"
        missing = self.missing
        if 0 < len(missing) < len(self.tasks):
            line += f"   (no score for {', '.join(missing)})"
        return line

    def shown(self, metric: str) -> str:
        """Return a metric in per cent, and of how many tasks it is the mean if not of all of them,
        such as ``-1.9 (1 of 4 tasks)``.
        """
        text = percent(self.metrics()[metric], sign=METRICS[metric].signed)
        count, all_tasks = self.task_counts()[metric]
        if 0 < count < all_tasks:
            text += f" ({count} of {all_tasks} tasks)"
        return text

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
    def mean_seen(self) -> NDArray[np.float64]:
        """``(T,)``: after each step, the mean score of the tasks merged so far; NaN unless all of
        them were scored.

        Tasks that never get a score, because the task pool lacks them, do not count.
        """
        scored = ~np.isnan(self.values[-1])
        means = np.full(len(self.tasks), math.nan)
        for step, scores in enumerate(self.values, 1):
            seen = scores[:step][scored[:step]]
            if seen.size:
                means[step - 1] = seen.mean()
        return means
