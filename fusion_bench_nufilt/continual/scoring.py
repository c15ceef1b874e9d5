"""The scores of a run: which tasks are scored after which step, and what becomes of the scores."""

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from fusion_bench_nufilt.results.metrics import AccuracyMatrix

from .evaluation import Evaluator, Report, score
from .program import ReportedTaskPool
from .run_folder import RunFolder
from .stream import Evaluate, tasks_to_score


class RunScores:
    """Scores the steps of a run and enters them into its accuracy matrix.

    Args:
        evaluator: what scores the models.
        matrix: the accuracy matrix of the run.
        evaluate: which tasks are scored, see :func:`tasks_to_score`.
        first_step: the number of the first step of the stream.
        folder: where reports are kept, if anywhere.
        log_dict: takes numbers for the loggers; None where there is no logger.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        matrix: AccuracyMatrix,
        evaluate: Evaluate,
        first_step: int,
        folder: RunFolder | None,
        log_dict: Callable[..., Any] | None,
    ) -> None:
        self.evaluator, self.matrix, self.folder = evaluator, matrix, folder
        self._evaluate, self._first_step, self._log_dict = evaluate, first_step, log_dict
        self._last_report: Report = {}

    @property
    def _last_step(self) -> int:
        return self._first_step - 1 + len(self.matrix.tasks)

    def tasks(self, step: int) -> list[str]:
        """Return the tasks that are scored after a step."""
        return tasks_to_score(self.matrix.tasks, step - self._first_step + 1, self._evaluate)

    def take(self, step: int, merged: nn.Module) -> None:
        """Score the model after a step."""
        if not (tasks := self.tasks(step)):
            return
        device = next(merged.parameters()).device
        report = self.evaluator.report(merged, tasks, others=step == self._last_step)
        merged.to(device)  # the task pool may have moved it
        if self.folder is not None:
            self.folder.save_report(step, report)
        self.record(step, report)

    def record(self, step: int, report: Report) -> None:
        """Enter the scores that a report has."""
        self._last_report = report
        scores = {task: score(report[task]) for task in self.tasks(step) if task in report}
        self.matrix.record(step - self._first_step + 1, scores)
        if self._log_dict is not None:
            self._log_dict({f"score/{task}": value for task, value in scores.items()}, step=step)
            if step == self._last_step:
                self._log_dict(self.matrix.metrics(), step=step)

    def restore(self, step: int, merged: nn.Module) -> None:
        """Enter the scores of an earlier process up to a step; those that were lost are taken again."""
        assert self.folder is not None
        for done in range(self._first_step, step + 1):
            if report := self.folder.read_report(done):
                self.record(done, report)
            elif self.tasks(done):
                self.folder.load_step(done, merged)
                self.take(done, merged)

    def final_taskpool(self, merged: nn.Module) -> ReportedTaskPool:
        """Return a task pool that answers FusionBench's evaluation of the final model with its last report.

        FusionBench prints this report last, so that a run ends with its metrics and with where its matrix is.
        """
        metrics: dict[str, Any] = {name: x for name, x in self.matrix.metrics().items() if not math.isnan(x)}
        if self.folder is not None:
            metrics["accuracy_matrix"] = str(self.folder.path / "accuracy_matrix.json")
        return ReportedTaskPool(self.evaluator.taskpool, merged, {**self._last_report, "continual": metrics})
