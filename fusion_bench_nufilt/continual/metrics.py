"""The accuracy matrix of a continual run, and what is read off it."""

import math
from collections.abc import Sequence

import numpy as np
from fusion_bench.metrics.continual_learning import compute_backward_transfer
from numpy.typing import NDArray


class AccuracyMatrix:
    r"""Scores :math:`a_i(\theta_t)` of task i after step t; NaN where not (or not yet) measured.

    Args:
        tasks: the T task names in the order in which they are merged.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        self.tasks = list(tasks)
        #: ``(T, T)``, row t-1 after step t, column i-1 for task i; fractions, not per cent
        self.values: NDArray[np.float64] = np.full((len(self.tasks), len(self.tasks)), math.nan)

    def record(self, step: int, scores: dict[str, float]) -> None:
        """Enter the scores of some tasks after a step (from 1); a score that is not a number stays missing."""
        for task, score in scores.items():
            self.values[step - 1, self.tasks.index(task)] = score

    @property
    def missing(self) -> list[str]:
        """Tasks that have no final score."""
        return [task for task, score in zip(self.tasks, self.values[-1], strict=True) if math.isnan(score)]

    @property
    def acc(self) -> float:
        r"""ACC :math:`= \operatorname{mean}_i a_i(\theta_T)` over the tasks that have a final score, else NaN."""
        final = self.values[-1]
        measured = final[~np.isnan(final)]
        return float(measured.mean()) if measured.size else math.nan

    @property
    def bwt(self) -> float:
        r"""BWT :math:`= \frac{1}{T-1} \sum_{i<T} [a_i(\theta_T) - a_i(\theta_i)]` of tasks with both, else NaN."""
        last, own = self.values[-1, :-1], np.diagonal(self.values)[:-1]
        both = [i for i in range(len(last)) if not (math.isnan(last[i]) or math.isnan(own[i]))]
        if not both:
            return math.nan
        return compute_backward_transfer(
            {self.tasks[i]: float(last[i]) for i in both}, {self.tasks[i]: float(own[i]) for i in both}
        )
