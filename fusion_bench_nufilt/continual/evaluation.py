"""Score merged models by FusionBench's own task pools, which are set up once for a whole stream."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any

from fusion_bench.compat.taskpool import TaskPool as V01TaskPool
from fusion_bench.models.hf_clip import HFCLIPClassifier
from fusion_bench.taskpool import CLIPVisionModelTaskPool
from fusion_bench.tasks.clip_classification import get_classnames_and_templates
from fusion_bench.utils.parameters import count_parameters
from torch import nn

from fusion_bench_nufilt.results.metrics import or_none

log = logging.getLogger(__name__)

Report = dict[str, Any]

# FusionBench's continual methods call `taskpool.evaluate` with its `_is_setup` reset, which loads models and data and
# encodes all prompts again at every step: most of a run's time. The scorers below keep what does not change.


class TasksByName(ABC):
    """A task pool that can be asked to score some of its tasks alone."""

    @property
    @abstractmethod
    def task_names(self) -> list[str]:
        """The names of all tasks."""

    @abstractmethod
    def evaluate(self, model: nn.Module, tasks: Sequence[str] | None = None) -> Report:
        """Return the results by task, of ``tasks`` alone if they are given."""


class Evaluator:
    """Evaluates models on some tasks of a FusionBench task pool.

    Args:
        taskpool: any FusionBench task pool. CLIP vision and v0.1 (Flan-T5) pools, and a :class:`TasksByName`, are
            narrowed to the tasks asked for; another pool evaluates all it has and the rest is dropped.
    """

    def __init__(self, taskpool: Any) -> None:
        self.taskpool = taskpool
        self._scorer: _Scorer
        if type(taskpool).evaluate is CLIPVisionModelTaskPool.evaluate:
            self._scorer = _CLIPVisionScorer(taskpool)
        elif isinstance(taskpool, V01TaskPool):
            self._scorer = _V01Scorer(taskpool)
        elif isinstance(taskpool, TasksByName):
            self._scorer = _Scorer(taskpool)
        else:
            self._scorer = _WholePoolScorer(taskpool)
        self._warned: set[str] = set()

    def report(self, model: nn.Module, tasks: Sequence[str], *, others: bool = False) -> Report:
        """Return FusionBench's report of a model.

        Args:
            model: may be moved to the task pool's device.
            tasks: what to evaluate; a task that the pool lacks is left out, with a warning.
            others: whether to evaluate the other tasks of the pool as well.
        """
        trainable, total = count_parameters(model)
        report: Report = {
            "model_info": {
                "trainable_params": trainable,
                "all_params": total,
                "trainable_percentage": trainable / total,
            }
        }
        results = self._scorer.evaluate(model, [*tasks, *(self._scorer.others(tasks) if others else ())])
        for task in tasks:
            if task not in results and task not in self._warned:
                self._warned.add(task)
                log.warning("the task pool has no task '%s': its scores are missing", task)
        # A constant prediction has no rank correlation: NaN, which JSON does not know, is a missing score.
        report |= {task: {key: or_none(value) for key, value in result.items()} for task, result in results.items()}
        report["average"] = {
            metric: or_none(sum(values) / len(values))
            for metric in ("accuracy", "loss")
            if (values := [result[metric] for result in results.values() if metric in result])
        }
        return report


def score(result: dict[str, float | None]) -> float:
    """Return the score of a task: accuracy, or Spearman's rho for a regression task, or else NaN (missing)."""
    value = result.get("accuracy", result.get("spearman_rho"))
    return math.nan if value is None else float(value)


def names_of(task: str) -> tuple[str, str]:
    """Return both names of a task: FusionBench calls its Flan-T5 models glue-cola, and their tasks cola."""
    return task, f"glue-{task}"


class _Scorer:
    """Scores the tasks of a pool that narrows itself."""

    def __init__(self, taskpool: Any) -> None:
        self.taskpool = taskpool

    def evaluate(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return the results of those tasks that the pool has."""
        return dict(self.taskpool.evaluate(model, tasks))

    def others(self, tasks: Sequence[str]) -> list[str]:
        """Return the tasks of the pool that are not among these."""
        return [name for name in self.taskpool.task_names if not set(names_of(name)) & set(tasks)]


class _CLIPVisionScorer(_Scorer):
    """Scores CLIP vision towers; the CLIP model, the data and the encoded prompts of every task are kept."""

    def __init__(self, taskpool: CLIPVisionModelTaskPool) -> None:
        super().__init__(taskpool)
        self._heads: dict[str, Any] = {}  # text features, (classes, projection_dim)

    def evaluate(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, float]]:
        pool = self.taskpool
        if not pool._is_setup:
            pool.setup()
        pool.clip_model.vision_model = model
        classifier = HFCLIPClassifier(pool.clip_model, processor=pool.processor)
        if pool.move_to_device:
            classifier = pool.fabric.to_device(classifier)
        results = {}
        for task in (task for task in tasks if task in pool.test_dataloaders):
            classnames, templates = get_classnames_and_templates(task)
            if task in self._heads:
                classifier.zeroshot_weights = self._heads[task]
            else:
                classifier.set_classification_task(classnames, templates)
                self._heads[task] = classifier.zeroshot_weights
            pool.on_task_evaluation_begin(classifier, task)
            results[task] = pool._evaluate(
                classifier, pool.test_dataloaders[task], num_classes=len(classnames), task_name=task
            )
            pool.on_task_evaluation_end()
        return results

    def others(self, tasks: Sequence[str]) -> list[str]:
        return [name for name in self.taskpool._test_datasets if name not in tasks]


class _V01Scorer(_Scorer):
    """Scores by FusionBench's v0.1 pools, such as Flan-T5 on GLUE; each task keeps its data."""

    def __init__(self, taskpool: V01TaskPool) -> None:
        super().__init__(taskpool)
        self._load = cache(taskpool.load_task)

    def evaluate(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, float]]:
        fabric = getattr(self.taskpool, "fabric", None)
        if fabric is not None:
            model = fabric.setup(model)
        own = {name: task for task in self.taskpool.task_names for name in names_of(task)}
        return {task: self._load(own[task]).evaluate(model) for task in tasks if task in own}


class _WholePoolScorer(_Scorer):
    """Scores by any other pool: what it reports, as it reports it."""

    def evaluate(self, model: nn.Module, tasks: Sequence[str]) -> dict[str, dict[str, float]]:
        report = self.taskpool.evaluate(model)
        if not isinstance(report, dict):
            raise ValueError(
                f"the task pool {type(self.taskpool).__name__} returned {report!r} in place of scores by task: merge "
                "with taskpool=dummy and score the saved model by other means"
            )
        return {task: report[task] for task in tasks if isinstance(report.get(task), dict)}

    def others(self, tasks: Sequence[str]) -> list[str]:
        return []
