"""Score merged models with FusionBench's own task pools, each set up once for a whole stream."""

import hashlib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from fusion_bench import RuntimeConstants
from fusion_bench.compat.taskpool import TaskPool as V01TaskPool
from fusion_bench.compat.taskpool.flan_t5_glue_text_generation import (
    FlanT5GLUETextGenerationTaskPool,
)
from fusion_bench.models.hf_clip import HFCLIPClassifier
from fusion_bench.taskpool import CLIPVisionModelTaskPool
from fusion_bench.tasks.clip_classification import (
    CLIPTemplateFactory,
    get_classnames_and_templates,
)
from fusion_bench.utils import instantiate
from fusion_bench.utils.parameters import count_parameters
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader, Subset
from typing_extensions import TypedDict

from fusion_bench_nufilt.methods.options import Evaluate
from fusion_bench_nufilt.pages.metrics import (
    ALL_TEST_DATA,
    AccuracyMatrix,
    Mean,
    or_none,
    scored_on,
)
from fusion_bench_nufilt.pages.page import PAGE
from fusion_bench_nufilt.utils.fingerprint import fingerprint_tensors
from fusion_bench_nufilt.utils.options import advice

from .content import describe_config, describe_items, load_data, refuse_other_spelling
from .models import IN_REPORTS
from .precision import widened
from .run_folder import RunFolder

log = logging.getLogger(__name__)

Report = dict[str, Any]
Results = dict[str, dict[str, float]]  # metrics by task
SubsetIndices = Callable[[int], Sequence[int]]  # which of a task's items, given how many there are
#: The attribute of a CLIP pool with the class names and prompts of its tasks.
_CLASSES = "_nufilt_classes"


class Scoring(TypedDict):
    """What scores depend on besides the model."""

    scored: str  # what of the data
    taskpool: Any  # its configuration
    test_data: dict[str, Any]  # what the data of each task are known by, where they are at hand


class TasksByName(ABC):
    """A task pool that can score some of its tasks alone."""

    task_names: list[str]  # all tasks

    @abstractmethod
    def evaluate(
        self, model: nn.Module, tasks: Sequence[str] | None = None, limit: int | None = None
    ) -> Results:
        """Return the results by task, for ``tasks`` only and on ``limit`` items of each, where
        these are given.
        """

    @abstractmethod
    def load_test_data(self) -> dict[str, Sequence[Any]]:
        """Return the test data by task, as far as they are at hand; they tell a task from another
        of its name.

        This is called before any model is loaded. A ValueError says which package, task or data is
        missing.
        """


class Evaluator:
    """Evaluates models on some tasks of any FusionBench task pool.

    CLIP vision and v0.1 (Flan-T5) pools, and a :class:`TasksByName`, score only the tasks asked
    for; any other pool evaluates all its tasks, and the rest is dropped.

    Args:
        taskpool: the task pool.
        subset: which items of each task are scored, by default all.
        data: what these items are, in words.

    Raises:
        ValueError: the pool can't select items.
    """

    def __init__(
        self, taskpool: Any, subset: SubsetIndices | None = None, data: str = ALL_TEST_DATA
    ) -> None:
        self.taskpool = taskpool
        self._pool = _scored_pool(taskpool, subset)
        if self._pool.is_fast:
            # A pool may have been given another value than the program.
            taskpool.fast_dev_run = True
        #: What of the data the scores are of, in words.
        self.scored = scored_on(data, one_batch=self._pool.is_fast)
        self._warned: set[str] = set()

    def compare_names(self, models: Sequence[str]) -> None:
        """Compare the names of models with those of the task pool's tasks, if it says what it has:
        a ValueError for another spelling, and a warning for a task that the pool lacks.
        """
        if not self._pool.names:
            return
        missing_tasks = [name for name in models if not self.has(name)]
        refuse_other_spelling(missing_tasks, self._pool.names, "the task pool")
        for task in missing_tasks:
            self._warn_of_missing(task)

    def _warn_of_missing(self, task: str) -> None:
        if task in self._warned:
            return
        self._warned.add(task)
        remedy = ""
        if self._pool.names:
            remedy = f"; {advice(task, self._pool.names)}"
        log.warning("the task pool has no task '%s': its scores are missing%s", task, remedy)

    @cached_property
    def description(self) -> Scoring:
        """What scores depend on besides the model. This loads the test data; a ValueError names a
        task whose data can't be loaded.
        """
        # Methods draw from the global generators, the same with and without a task pool.
        with torch.random.fork_rng(devices=_gpus()):
            test_data = self._pool.describe_test_data()
        return Scoring(
            scored=self.scored,
            taskpool=describe_config(self._pool.config()),
            test_data=test_data,
        )

    def report(
        self, model: nn.Module, tasks: Sequence[str], *, further_tasks: bool = False
    ) -> Report:
        """Return FusionBench's report of a model.

        A task that the pool lacks is left out, with a warning; ``further_tasks`` adds the tasks of
        the pool beyond ``tasks``.
        """
        scored_tasks = self._with_further(tasks) if further_tasks else tasks
        device = next(model.parameters()).device
        try:
            results = self._pool.score(model, scored_tasks)
        finally:
            model.to(device)  # the task pool may have moved it
        for task in tasks:
            if task not in results:
                self._warn_of_missing(task)
        trainable, total = count_parameters(model)
        report: Report = {}
        report["model_info"] = {
            "trainable_params": trainable,
            "all_params": total,
            "trainable_percentage": trainable / total,
        }
        # A constant prediction has no rank correlation: NaN, which JSON does not know, is a missing
        # score.
        for task, result in results.items():
            report[task] = {metric: or_none(value) for metric, value in result.items()}
        report["average"] = average(report, list(results))
        return report

    def has(self, task: str) -> bool:
        """Tell whether the task pool is known to have a task; some pools do not say what they
        have.
        """
        return name_in_pool(task, self._pool.names) is not None

    def _with_further(self, tasks: Sequence[str]) -> list[str]:
        """Return the tasks, and those of the pool that are none of them."""
        further = []
        for name in self._pool.names:
            if not any(alias in tasks for alias in task_aliases(name)):
                further.append(name)
        return [*tasks, *further]


def average(report: Report, tasks: Sequence[str]) -> dict[str, float | None]:
    """Return FusionBench's average of tasks in a report; a metric that one of them lacks a value of
    has none.
    """
    means = {}
    for metric in ("accuracy", "loss"):
        values = [report[task][metric] for task in tasks if metric in report[task]]
        if values:
            means[metric] = None if None in values else sum(values) / len(values)
    return means


def score(result: dict[str, float | None]) -> float:
    """Return the score of a task: accuracy, or Spearman's rho for a regression task, or else NaN
    (missing).
    """
    value = result.get("accuracy", result.get("spearman_rho"))
    if value is None:
        return math.nan
    return float(value)


def scores_of(report: Report, tasks: Iterable[str]) -> dict[str, float]:
    """Return the scores of tasks, as far as a report has these."""
    return {task: score(report[task]) for task in tasks if task in report}


def unaveraged(report: Report, tasks: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the metrics of tasks without a score, which are in no mean."""
    metrics_by_task = {}
    for task in tasks:
        metrics = {}
        for metric, value in report.get(task, {}).items():
            if value is not None:
                metrics[metric] = value
        if metrics:
            metrics_by_task[task] = metrics
    return metrics_by_task


def task_aliases(task: str) -> tuple[str, str]:
    """Return both names of a task: FusionBench calls its Flan-T5 models glue-cola, and their tasks
    cola.
    """
    return task, f"glue-{task}"


def name_in_pool(task: str, names: Iterable[str]) -> str | None:
    """Return the name of a task among those of a task pool, which may have an alias for it."""
    if task in names:
        return task
    for name in names:
        if task in task_aliases(name):
            return name
    return None


def test_loader(taskpool: Any, task: str) -> Any:
    """Return the loader of a task's test set; a ValueError names a pool that has none."""
    pool = _scored_pool(taskpool)
    name = name_in_pool(task, pool.names or [task])
    if name is None:
        raise ValueError(
            f"the task pool {type(taskpool).__name__} has no data of task '{task}', only of "
            f"{', '.join(pool.names)}"
        )
    return pool.loader(name)


def set_up(pool: Any) -> None:
    """Set up a FusionBench pool that has test sets, once, and note the class names and prompts of a
    CLIP pool.

    FusionBench keeps these by the task's name, for the whole process: whatever pool is set up later
    may have other classes under that name.
    """
    if not pool._is_setup:
        configs = pool._test_datasets
        try:
            # Loaded here, so that an error names the task.
            pool._test_datasets = _load_test_sets(pool)
            pool.setup()
        finally:
            pool._test_datasets = configs
    if _is_clip(pool) and not hasattr(pool, _CLASSES):
        setattr(pool, _CLASSES, {})
        for task in pool.test_datasets:
            if task in CLIPTemplateFactory.get_available_datasets():
                getattr(pool, _CLASSES)[task] = get_classnames_and_templates(task)


def _load_test_sets(pool: Any) -> dict[str, Any]:
    """Return the test sets of a FusionBench pool, which has their configurations."""
    test_sets = {}
    for task, config in pool._test_datasets.items():
        test_sets[task] = config
        if OmegaConf.is_config(config):
            test_sets[task] = load_data(task, partial(instantiate, config))
    return test_sets


def classes_and_templates(pool: Any, task: str) -> tuple[list[str], list[Callable[[str], str]]]:
    """Return the class names of a task and the functions that make prompts of them: those that a
    CLIP pool had when it was set up, or else FusionBench's for that name.
    """
    classes: dict[str, Any] = getattr(pool, _CLASSES, {})
    if task in classes:
        classnames, templates = classes[task]
    else:
        classnames, templates = get_classnames_and_templates(task)
    return classnames, templates


def _gpus() -> list[int]:
    """Return the number of the GPU whose generator is in use, if there is one."""
    if torch.cuda.is_available():
        return [torch.cuda.current_device()]
    return []


def _is_clip(pool: Any) -> bool:
    return getattr(type(pool), "evaluate", None) is CLIPVisionModelTaskPool.evaluate


class _ScoredPool:
    """What is asked of a task pool, here one of any kind, which scores all its tasks and reports as
    it likes.

    FusionBench's continual methods reset ``_is_setup`` before ``evaluate``, which then loads models
    and data and encodes all prompts again, and takes most of a run's time. The other kinds keep
    what does not change.
    """

    can_select = False  # which items are scored

    def __init__(self, pool: Any, subset: SubsetIndices | None) -> None:
        self.pool = pool
        self.subset = subset
        if subset is not None and not self.can_select:
            raise ValueError(
                f"a part of the test data needs a CLIP or Flan-T5 pool, got {type(pool).__name__}"
            )
        tasks = getattr(pool, "_test_datasets", getattr(pool, "task_names", ()))
        self.names: list[str] = list(tasks)  # none where the pool does not say what it has

    @property
    def is_fast(self) -> bool:
        """Whether one batch of each task is to be scored, as the program or the pool says."""
        return RuntimeConstants.debug or getattr(self.pool, "fast_dev_run", False)

    def config(self) -> dict[str, Any]:
        """Return the configuration that the pool was made from, with its class."""
        kind = type(self.pool)
        config: dict[str, Any] = {"_target_": f"{kind.__module__}.{kind.__qualname__}"}
        for attribute, key in getattr(self.pool, "_config_mapping", {}).items():
            config[key] = getattr(self.pool, attribute, None)
        return config

    def describe_test_data(self) -> dict[str, Any]:
        """Load the test data of all tasks, and return what they are known by, as far as the pool
        has them apart.
        """
        return {task: describe_items(items) for task, items in self._test_data().items()}

    def _test_data(self) -> Mapping[str, Any]:
        if hasattr(self.pool, "_test_datasets"):
            return _load_test_sets(self.pool)
        return {}

    def score(self, model: nn.Module, tasks: Sequence[str]) -> Results:
        """Return the results of a model by task, without tasks that the pool lacks."""
        report = self.pool.evaluate(model)
        if not isinstance(report, dict):
            raise ValueError(
                f"the task pool {type(self.pool).__name__} returned {report!r} in place of scores "
                "by task: merge with taskpool=dummy and score the saved model by other means"
            )
        return {task: report[task] for task in tasks if isinstance(report.get(task), dict)}

    def loader(self, task: str) -> Any:
        """Return the loader of a task's test set."""
        if hasattr(self.pool, "get_test_dataloader"):
            return self.pool.get_test_dataloader(task)
        if hasattr(self.pool, "_test_datasets"):
            set_up(self.pool)
            return self.pool.test_dataloaders[task]
        raise ValueError(
            f"the task pool {type(self.pool).__name__} has no test data of a single task (no "
            "test_dataloaders, get_test_dataloader or load_task); `nufilt analyze --base … "
            "--task …` needs no data"
        )


class _ByName(_ScoredPool):
    """An evaluation harness."""

    def _test_data(self) -> Mapping[str, Any]:
        return dict(self.pool.load_test_data())

    def score(self, model: nn.Module, tasks: Sequence[str]) -> Results:
        limit = getattr(self.pool, "batch_size", 1) if self.is_fast else None
        results: Results = self.pool.evaluate(model, tasks, limit)
        return results


class _V01(_ScoredPool):
    """One of FusionBench's v0.1 pools, such as Flan-T5 on GLUE; each task keeps its data."""

    def __init__(self, pool: Any, subset: SubsetIndices | None) -> None:
        self.can_select = isinstance(pool, FlanT5GLUETextGenerationTaskPool)
        super().__init__(pool, subset)
        self._load = cache(self._load_task)

    @property
    def is_fast(self) -> bool:
        return super().is_fast or self.pool.config.get("fast_dev_run", False)

    def config(self) -> dict[str, Any]:
        config: Any = OmegaConf.to_container(self.pool.config, resolve=True)
        config = {**super().config(), **config}
        if hasattr(self.pool, "fabric"):
            # These pools alone have Fabric set up the model.
            config["precision"] = str(self.pool.fabric.strategy.precision.precision)
        return config

    def _load_task(self, name: str) -> Any:
        """Load a task with the items that are scored."""
        task = copy(load_data(name, partial(self.pool.load_task, name)))
        if not hasattr(task, "test_dataset"):
            return task
        if self.subset is not None:
            task.test_dataset = task.test_dataset.select(self.subset(len(task.test_dataset)))
        if self.is_fast:
            count = min(self.pool.config.get("batch_size", 1), len(task.test_dataset))
            task.test_dataset = task.test_dataset.select(range(count))
        return task

    def _test_data(self) -> Mapping[str, Any]:
        data = {name: getattr(self._load(name), "test_dataset", None) for name in self.names}
        return {name: items for name, items in data.items() if items is not None}

    def score(self, model: nn.Module, tasks: Sequence[str]) -> Results:
        if hasattr(self.pool, "fabric"):
            model = self.pool.fabric.setup(model)
        results = {}
        for task in tasks:
            name = name_in_pool(task, self.names)
            if name is not None:
                results[task] = self._load(name).evaluate(model)
        return results

    def loader(self, task: str) -> Any:
        return self.pool.load_task(task).test_loader


class _CLIP(_ScoredPool):
    """FusionBench's pool for CLIP vision towers."""

    can_select = True

    def __init__(self, pool: Any, subset: SubsetIndices | None) -> None:
        super().__init__(pool, subset)
        self._heads: dict[str, Any] = {}  # the encoded prompts (classes, projection_dim) by task
        if pool._is_setup:
            set_up(pool)

    def config(self) -> dict[str, Any]:
        config = super().config()
        # These are known by their content, wherever they come from.
        del config["test_datasets"], config["clip_model"]
        return config

    def describe_test_data(self) -> dict[str, Any]:
        """Return what pictures, prompts and the text tower are known by."""
        set_up(self.pool)
        text_tower = {}
        for key, value in self.pool.clip_model.state_dict().items():
            if not key.startswith("vision_model."):  # each model that is scored takes its place
                text_tower[key] = value
        test_data: dict[str, Any] = {"text tower": fingerprint_tensors(text_tower)}
        for task, dataset in self.pool.test_datasets.items():
            classnames, templates = classes_and_templates(self.pool, task)
            prompts: list[str] = []
            for name in classnames:
                prompts += [template(name) for template in templates]
            digest = hashlib.sha256("\n".join(prompts).encode()).hexdigest()
            test_data[task] = {**describe_items(dataset), "prompts": digest}
        return test_data

    def score(self, model: nn.Module, tasks: Sequence[str]) -> Results:
        pool = self.pool
        set_up(pool)
        pool.clip_model.vision_model = model
        classifier = HFCLIPClassifier(pool.clip_model, processor=pool.processor)
        if pool.move_to_device:
            classifier = pool.fabric.to_device(classifier)
        results = {}
        for task in tasks:
            if task not in pool.test_dataloaders:
                continue
            classnames, templates = classes_and_templates(pool, task)
            # Prompts depend on the text tower alone, which no merge changes.
            if task in self._heads:
                classifier.zeroshot_weights = self._heads[task]
            else:
                classifier.set_classification_task(classnames, templates)
                self._heads[task] = classifier.zeroshot_weights
            pool.on_task_evaluation_begin(classifier, task)
            images = pool.test_dataloaders[task]
            if self.subset is not None:
                items = Subset(images.dataset, self.subset(len(images.dataset)))
                images = DataLoader(items, images.batch_size, collate_fn=images.collate_fn)
                images = pool.fabric.setup_dataloaders(images, move_to_device=pool.move_to_device)
            dtypes = {parameter.dtype for parameter in classifier.parameters()}
            # A CLIP's tower may have another dtype than its rest.
            with widened(classifier) if len(dtypes) > 1 else nullcontext():
                results[task] = pool._evaluate(
                    classifier, images, num_classes=len(classnames), task_name=task
                )
            pool.on_task_evaluation_end()
        return results


def _scored_pool(pool: Any, subset: SubsetIndices | None = None) -> _ScoredPool:
    kind = _ScoredPool
    if _is_clip(pool):
        kind = _CLIP
    elif isinstance(pool, V01TaskPool):
        kind = _V01
    elif isinstance(pool, TasksByName):
        kind = _ByName
    return kind(pool, subset)


@dataclass
class RunScores:
    """Scores the steps of a run and enters them into its accuracy matrix."""

    evaluator: Evaluator
    matrix: AccuracyMatrix
    earlier: int  # how many tasks of the matrix, its first ones, are in `_merged_` already
    evaluate: Evaluate
    first_step: int  # the number of the first step of the stream
    folder: RunFolder | None  # where reports are saved, if anywhere
    log_dict: Callable[..., Any] | None  # sends numbers to the loggers, if there are any
    last_report: Report = field(default_factory=dict)

    def tasks(self, step: int) -> list[str]:
        """Return the tasks that are scored after a step."""
        return tasks_to_score(self.matrix.tasks, self.row(step), self.evaluate)

    def row(self, step: int) -> int:
        """Return the row of the matrix, from 1, that is for a step."""
        return self.earlier + step - self.first_step + 1

    def is_last(self, step: int) -> bool:
        return self.row(step) == len(self.matrix.tasks)

    def take_earlier_scores(self, merged_before: Path | None) -> None:
        """Enter the scores of the tasks of ``_merged_`` after their own steps, if the folder of its
        run has them, of the same test data; BWT needs them.
        """
        if merged_before is None or merged_before.resolve().parent.name != "checkpoints":
            return  # it is no step of a run
        run_before = RunFolder(merged_before.resolve().parent.parent)
        scores = run_before.finished_scores(self.evaluator.description)
        earlier_tasks = self.matrix.tasks[: self.earlier]
        for step, task in enumerate(earlier_tasks, 1):
            if scores is not None and task in scores.tasks:
                row = scores.values[scores.tasks.index(task)]
                by_task = dict(zip(scores.tasks, row, strict=True))
                known = {name: by_task[name] for name in earlier_tasks[:step] if name in by_task}
                self.matrix.record(step, known)

    def score_earlier_tasks(self, merged_before: nn.Module) -> None:
        """Score the model that the run goes on from on its own tasks, to see what they lose."""
        if self.earlier == 0 or self.evaluate == "last":
            return
        tasks = self.matrix.tasks[: self.earlier]
        report = self._report(self.first_step - 1, lambda: merged_before, tasks)
        self.matrix.record(self.earlier, scores_of(report, tasks))

    def means_of_earlier(self) -> tuple[float, float]:
        """Return the mean score of the earlier tasks before and after the run; NaN if unknown."""
        first_scores = self.matrix.values[self.earlier - 1, : self.earlier]
        last_scores = self.matrix.values[-1, : self.earlier]
        return Mean.of(first_scores).mean, Mean.of(last_scores).mean

    def score_step(self, step: int, model: Callable[[], nn.Module]) -> None:
        """Enter the scores of a step: those of its report, or else of the model after it."""
        tasks = self.tasks(step)
        if not tasks:
            return
        self.last_report = self._report(step, model, tasks)
        scores = scores_of(self.last_report, tasks)
        self.matrix.record(self.row(step), scores)
        if self.log_dict is not None:
            self.log_dict({f"score/{task}": value for task, value in scores.items()}, step=step)
            # ACC and BWT need the scores of the last model.
            if self.is_last(step):
                self.log_dict(self.matrix.metrics(), step=step)

    def _report(self, step: int, model: Callable[[], nn.Module], tasks: Sequence[str]) -> Report:
        """Return FusionBench's report of a step, which is read, or else made and saved.

        Its ``average`` is that of all tasks merged so far; where one of them has no score, there is
        none.
        """
        if self.folder is not None:
            saved = self.folder.read_report(step)
            if saved is not None:
                return saved
        report = self.evaluator.report(model(), tasks, further_tasks=self.is_last(step))
        del report["average"]
        merged_tasks = self.matrix.tasks[: self.row(step)]
        if all(task in report for task in merged_tasks):
            report["average"] = average(report, merged_tasks)
        if self.folder is not None:
            self.folder.save_report(step, report)
        return report

    def final_report(self) -> Report:
        """Return the last report, with the metrics of the run and the paths of its matrix and its
        page.
        """
        metrics: dict[str, Any] = {}
        for name, value in self.matrix.metrics().items():
            if not math.isnan(value):  # some need scores that `evaluate` may leave out
                metrics[name] = value
        metrics["scored"] = self.evaluator.scored
        if self.folder is not None:
            metrics["accuracy_matrix"] = str(self.folder.path / "accuracy_matrix.json")
            metrics["page"] = str(self.folder.path / PAGE)
        # FusionBench's report of a merged model is on all tasks of the pool.
        tasks = [name for name in self.last_report if name not in IN_REPORTS]
        mean = average(self.last_report, tasks)
        return {**self.last_report, "average": mean, "continual": metrics}


def tasks_to_score(order: Sequence[str], step: int, evaluate: Evaluate) -> list[str]:
    """Return the tasks to score once ``step`` tasks are merged, see
    :attr:`ProtocolConfig.evaluate`.

    Of T tasks, ``diagonal`` takes 2T-1 scores in all, ``every_step`` T(T+1)/2 and
    ``every_step_all`` T^2.
    """
    if evaluate == "every_step_all":
        return list(order)
    if step == len(order) or evaluate == "every_step":
        return list(order[:step])
    if evaluate == "diagonal":
        return [order[step - 1]]
    return []  # evaluate == "last"
