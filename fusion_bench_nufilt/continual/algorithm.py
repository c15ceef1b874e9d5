"""The protocol that every continual merging method runs under."""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from fusion_bench import BaseAlgorithm, BaseModelPool, auto_register_config
from fusion_bench.mixins import LightningFabricMixin, SimpleProfilerMixin
from fusion_bench.taskpool import DummyTaskPool
from omegaconf import OmegaConf
from torch import nn
from tqdm.auto import tqdm

from fusion_bench_nufilt.core.options import split_options, takes_options, unknown_option
from fusion_bench_nufilt.results import leave_page
from fusion_bench_nufilt.results.matrix import print_matrix, save_matrix
from fusion_bench_nufilt.results.metrics import AccuracyMatrix
from fusion_bench_nufilt.storage.versions import package_versions

from .evaluation import Evaluator, Report, score
from .loading import describe_model, load_model, refuse_drawn
from .program import ReportedTaskPool, one_line_errors, use_bundled_taskpool
from .protocol import ProtocolConfig
from .run_folder import RunFolder, open_run_folder
from .stream import MERGED, Evaluate, merged_before, merged_manifest, task_order, tasks_to_score
from .trackers import log_picture

log = logging.getLogger(__name__)

_NOT_IN_THE_RESULT = ("_target_", "save_on_every_step", "check_models", "resume", "devices")


@auto_register_config
@takes_options(ProtocolConfig)
class ContinualMergingAlgorithm(LightningFabricMixin, SimpleProfilerMixin, BaseAlgorithm):
    """Merges a stream of models one after another, scores the result, saves every step.

    A subclass says how one model is merged (:meth:`merge_step`) and which models it refuses (:meth:`check_model`).
    At no time are more than three models held: the pretrained, the merged and the new one. A pool with a ``_merged_``
    model goes on from there; steps are counted from the first model that is in it.

    Args:
        **kwargs: options of :class:`ProtocolConfig`.

    Raises:
        ValueError: a value out of its range, or an option that there is not; names it.
    """

    # of the last run
    folder: RunFolder | None  # its log directory
    matrix: AccuracyMatrix
    merge_seconds: list[float]  # by step, without loading, saving and scoring
    history: list[str]  # names of the models in `_merged_`, as far as they are known
    first_step: int  # number of the first model of the stream: 1 without `_merged_`

    # set by auto_register_config
    shuffle_order: bool
    seed: int
    evaluate: Evaluate
    save_on_every_step: bool
    check_models: bool
    resume: bool
    num_merged: int | None

    def __init__(self, **kwargs: Any) -> None:
        _, others = split_options([ProtocolConfig], kwargs)
        for key in others:
            if key not in self._config_mapping.values():
                raise ValueError(f"{type(self).__name__}: {unknown_option(key, self._config_mapping.values())}")
        super().__init__(**others)

    @property
    def name(self) -> str:
        """Of the method, for people."""
        return type(self).__name__

    @property
    def taskpool(self) -> Any:
        """What scores the run, if anything does."""
        return None if self.evaluator is None else self.evaluator.taskpool

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        """Called once, with the pretrained model and the names in merging order, before anything else."""

    def check_model(self, pretrained: nn.Module, model: nn.Module, name: str) -> None:
        """Raise ValueError, naming model and layer, for a model that cannot be merged."""

    def take_up(self, manifest: Mapping[str, Any]) -> None:
        """Called before a stream goes on from a merged model, with its manifest; empty if there is none."""

    def uses(self, key: str) -> bool:
        """Whether a parameter of the models goes into the result, by its name in the state dict."""
        return True

    def restore(self, step: int) -> None:
        """Called when a run goes on after ``step``: take up what the log directory has of the steps before."""

    def describe(self) -> dict[str, Any]:
        """What the manifest of a saved step says about the merge, beside its order, seeds and options."""
        return {}

    def merge_step(self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module) -> nn.Module:
        """Merge model ``name``, number ``step`` (from 1), and return the new merged model.

        ``merged`` equals ``pretrained`` at step 1 and may be changed in place; the other two may not.
        """
        raise NotImplementedError

    def on_run_start(self) -> None:
        """Use the task pool that the model pool brings along, unless the user named one."""
        if self._program is not None:
            use_bundled_taskpool(self._program)

    @torch.no_grad()
    def run(
        self,
        modelpool: BaseModelPool | Mapping[str, nn.Module],
        taskpool: Any = None,
        on_step: Callable[[int], Any] | None = None,
    ) -> nn.Module:
        """Merge all models of a pool.

        Args:
            modelpool: FusionBench model pool, or a dict of models; ``_pretrained_`` is the pretrained one, and
                ``_merged_``, if there is one, what was merged before.
            taskpool: FusionBench task pool, or an evaluator that other runs share; default: the program's task pool.
                Without one nothing is scored.
            on_step: called with the number of each step that is merged, saved and scored.

        Returns:
            The merged model. :attr:`matrix` holds the scores.
        """
        if not isinstance(modelpool, BaseModelPool):
            modelpool = BaseModelPool(dict(modelpool))
        with one_line_errors(self._program), open_run_folder(self.log_dir) as self.folder:
            return self._run(modelpool, taskpool, on_step)

    def _run(self, modelpool: BaseModelPool, taskpool: Any, on_step: Callable[[int], Any] | None) -> nn.Module:
        if not modelpool.has_pretrained:
            raise ValueError(f"the model pool has no '_pretrained_' model, only {modelpool.all_model_names}")
        if not modelpool.model_names:
            raise ValueError("the model pool is empty: there is no fine-tuned model to merge")
        if self.fabric.world_size > 1:
            raise ValueError("continual merging runs in one process: set fabric.devices=1")
        self.history, self.first_step = merged_before(modelpool, self.num_merged)
        if taskpool is None and self._program is not None:
            taskpool = self._program.taskpool
        scored = taskpool is not None and not isinstance(taskpool, DummyTaskPool)
        self.evaluator = taskpool if isinstance(taskpool, Evaluator) else Evaluator(taskpool) if scored else None
        self.on_step = on_step

        names = task_order(modelpool.model_names, shuffle=self.shuffle_order, seed=self.seed)
        self.matrix, self.merge_seconds = AccuracyMatrix(names), []
        self._about = self._describe_run(modelpool)
        with self.profile("loading models"):
            pretrained, drawn = load_model(modelpool, "_pretrained_")
        self.start(pretrained, names)
        self._check(pretrained, pretrained, "_pretrained_", drawn)
        if self.check_models:
            self._check_all(modelpool, pretrained, names)
        if self.folder is not None:
            self.folder.save_json("model_names.json", names)
        merged = self.merge_stream(modelpool, pretrained, names)
        if self.evaluator is not None:
            self._finish()
        self.print_profile_summary()
        return merged

    def merge_stream(self, modelpool: BaseModelPool, pretrained: nn.Module, names: list[str]) -> nn.Module:
        """Merge models one after another, calling :meth:`finish_step` after each; returns the last merged model."""
        merged = deepcopy(pretrained)
        if MERGED in modelpool.all_model_names:
            with self.profile("loading models"):
                previous, drawn = load_model(modelpool, MERGED)
            self._check(pretrained, previous, MERGED, drawn)
            self.take_up(merged_manifest(modelpool))
            merged.load_state_dict(previous.state_dict())
            del previous
        next_step = self._restore_newest_step(merged) + 1 if self.resume else self.first_step
        for step, name in tqdm(enumerate(names, self.first_step), "Merging models", len(names), disable=None):
            if step < next_step:
                continue
            with self.profile("loading models"):
                task, drawn = load_model(modelpool, name)
            if not self.check_models:
                self._check(pretrained, task, name, drawn)
            begin = time.perf_counter()
            with self.profile("merging"):
                merged = self.merge_step(step, name, pretrained, merged, task)
            del task
            self.finish_step(step, merged, time.perf_counter() - begin)
        return merged

    def finish_step(self, step: int, merged: nn.Module, seconds: float) -> None:
        """Save and score the model that step ``step`` took ``seconds`` to make."""
        self.merge_seconds.append(seconds)
        names = self.matrix.tasks
        done = names[: step - self.first_step + 1]
        log.info("step %d: merged '%s' (%d of %d) in %.1f s", step, done[-1], len(done), len(names), seconds)
        if self.save_on_every_step and self.folder is not None:
            about = {"step": step, "tasks": self.history + done, "merge_seconds": self.merge_seconds}
            with self.profile("saving"):
                self.folder.save_step(step, merged, {**about, **self.describe(), "run": self._about})
        if self.evaluator is not None:
            device = next(merged.parameters()).device
            with self.profile("evaluating"):
                self._evaluate_step(self.evaluator, step, merged)
            merged.to(device)  # the task pool may have moved it
        if self.on_step is not None:
            self.on_step(step)

    def _check_all(self, modelpool: BaseModelPool, pretrained: nn.Module, names: list[str]) -> None:
        with self.profile("checking models"):
            for name in tqdm(names, desc="Checking models", disable=None):
                model, drawn = load_model(modelpool, name)
                self._check(pretrained, model, name, drawn)

    def _check(self, pretrained: nn.Module, model: nn.Module, name: str, drawn: Sequence[str]) -> None:
        """Refuse a model that cannot be merged, or whose merged weights were drawn at random."""
        refuse_drawn(name, list(filter(self.uses, drawn)))
        self.check_model(pretrained, model, name)

    def _restore_newest_step(self, merged: nn.Module) -> int:
        """Give ``merged`` the weights after the newest whole step that the log directory holds; returns its number."""
        first, last = self.first_step, self._last_step
        manifest = None if self.folder is None else self.folder.newest_step(first, last, self._about)
        if self.folder is None or manifest is None:
            return self.first_step - 1
        step = manifest["step"]
        log.info("going on after step %d", step)
        self.merge_seconds = manifest["merge_seconds"]
        if self.evaluator is not None:
            for done in range(self.first_step, step + 1):
                if report := self.folder.read_report(done):
                    self._record(self.evaluator, done, merged, report)
                elif self._tasks_to_score(done):  # interrupted before its scores, or they were damaged since
                    self.folder.load_step(done, merged)
                    self._evaluate_step(self.evaluator, done, merged)
        self.folder.load_step(step, merged)
        self.take_up(manifest)
        self.restore(step)
        return step

    def _evaluate_step(self, evaluator: Evaluator, step: int, merged: nn.Module) -> None:
        if not (tasks := self._tasks_to_score(step)):
            return
        report = evaluator.report(merged, tasks, others=step == self._last_step)
        if self.folder is not None:
            self.folder.save_report(step, report)
        self._record(evaluator, step, merged, report)

    def _record(self, evaluator: Evaluator, step: int, merged: nn.Module, report: Report) -> None:
        scores = {task: score(report[task]) for task in self._tasks_to_score(step) if task in report}
        self.matrix.record(step - self.first_step + 1, scores)
        if self.fabric.loggers:
            self.log_dict({f"score/{task}": value for task, value in scores.items()}, step=step)
            if step == self._last_step:
                self.log_dict(self.matrix.metrics(), step=step)
        if step == self._last_step and self._program is not None:
            # FusionBench prints this report last, so that a run ends with its metrics and where the matrix is.
            metrics: dict[str, Any] = {name: x for name, x in self.matrix.metrics().items() if not math.isnan(x)}
            if self.folder is not None:
                metrics["accuracy_matrix"] = str(self.folder.path / "accuracy_matrix.json")
            self._program.taskpool = ReportedTaskPool(evaluator.taskpool, merged, {**report, "continual": metrics})

    def _tasks_to_score(self, step: int) -> list[str]:
        return tasks_to_score(self.matrix.tasks, step - self.first_step + 1, self.evaluate)

    @property
    def _last_step(self) -> int:
        return self.first_step - 1 + len(self.matrix.tasks)

    def _finish(self) -> None:
        print_matrix(self.matrix, title=f"{self.name}: score (%) of each task after each step")
        if self.folder is None:
            return
        about = {
            "method": self.name,
            "config": OmegaConf.to_container(self.config, resolve=True),
            "models": self._about["models"],
            "merge_seconds": self.merge_seconds,
            "versions": package_versions(),
        }
        save_matrix(self.matrix, self.folder.path, about)
        log_picture(self.fabric.loggers, "accuracy_matrix", self.folder.path / "accuracy_matrix.png", self._last_step)
        leave_page(self.folder.path)
        log.info("accuracy_matrix.json, .csv and .png are in %s", self.folder.path)

    def _describe_run(self, modelpool: BaseModelPool) -> dict[str, Any]:
        """All that the models after each step depend on: an interrupted run goes on only if nothing of it changed."""
        config: Any = OmegaConf.to_container(self.config, resolve=True)
        settings = {str(key): value for key, value in config.items() if key not in _NOT_IN_THE_RESULT}
        models = {name: describe_model(modelpool, name) for name in modelpool.all_model_names}
        run = {"method": self.name, "order": self.matrix.tasks, "models": models, **settings}
        return dict(json.loads(json.dumps(run)))
