"""The base of the task pools that score by an evaluation harness."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fusion_bench import BaseTaskPool
from fusion_bench.mixins import LightningFabricMixin
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_nufilt.continual import TasksByName

Results = dict[str, dict[str, Any]]
"""Metrics by task, such as ``{"acc,none": 0.5, "acc_stderr,none": 0.01}``; the part after the comma is a filter."""


class HarnessTaskPool(LightningFabricMixin, BaseTaskPool, TasksByName):
    """One task of an evaluation harness for each model of a pool.

    Args:
        tasks: the harness's tasks by the names of the models, or a list where the names are the same.
        metric: the metric that counts, without its filter; None takes the first of ``metrics`` that a task has.
    """

    metrics: ClassVar[tuple[str, ...]]

    def __init__(self, tasks: Mapping[str, str] | Sequence[str], metric: str | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        plain: Any = OmegaConf.to_container(tasks) if OmegaConf.is_config(tasks) else tasks
        self._names: dict[str, str] = dict(plain) if isinstance(plain, Mapping) else {name: name for name in plain}
        self._metrics = self.metrics if metric is None else (metric,)

    @property
    def task_names(self) -> list[str]:
        """The names of the models."""
        return list(self._names)

    def evaluate(self, model: nn.Module, tasks: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
        """Score a model.

        Args:
            model: a model of transformers.
            tasks: names of the models whose tasks count; None is all.

        Returns:
            ``{name: {"accuracy": score}}``; the score is the metric's, which need not be an accuracy.

        Raises:
            ValueError: a task does not have the metric; the message lists the metrics it has.
        """
        names = {name: task for name, task in self._names.items() if tasks is None or name in tasks}
        results = self.run_harness(model, sorted(set(names.values()))) if names else {}
        return {name: {"accuracy": self._score(task, results[task])} for name, task in names.items()}

    @abstractmethod
    def run_harness(self, model: nn.Module, tasks: list[str]) -> Results:
        """Return what the harness measures of a model."""

    def _score(self, task: str, results: Mapping[str, Any]) -> float:
        found: dict[str, Any] = {}
        for key, value in results.items():
            if "," in key:
                found.setdefault(key.partition(",")[0], value)
        for metric in self._metrics:
            if metric in found:
                return float(found[metric])
        there = sorted(name for name in found if "_stderr" not in name)
        raise ValueError(f"task '{task}' has no metric {' or '.join(self._metrics)}, only {', '.join(there)}")
