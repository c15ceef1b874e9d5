"""The protocol that every continual merging method runs under."""

import importlib.metadata
import json
import logging
import time
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

import torch
from fusion_bench import BaseAlgorithm, BaseModelPool, auto_register_config
from fusion_bench.mixins import LightningFabricMixin, SimpleProfilerMixin
from fusion_bench.taskpool import DummyTaskPool
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch import nn
from tqdm.auto import tqdm

from .checkpoint import atomic_file, save_checkpoint, write_text
from .evaluation import Evaluator, Report, score
from .metrics import AccuracyMatrix
from .report import print_matrix, save_matrix
from .stream import Evaluate, task_order, tasks_to_score

log = logging.getLogger(__name__)


@auto_register_config
class ContinualMergingAlgorithm(LightningFabricMixin, SimpleProfilerMixin, BaseAlgorithm):
    """Merges a stream of models one after another, scores the result, saves every step.

    A subclass says how one model is merged (:meth:`merge_step`) and which models it refuses (:meth:`check_model`).
    At no time are more than three models held: the pretrained, the merged and the new one.

    Args:
        shuffle_order: shuffle the models with ``random.Random(seed)``; otherwise they come in the pool's order.
        seed: of the order and of everything drawn.
        evaluate: ``last``, ``diagonal`` or ``every_step``, see :func:`fusion_bench_nufilt.continual.tasks_to_score`.
        save_on_every_step: keep ``checkpoints/merged_model_{step}`` in the log directory.
        check_models: load every model once before the first step, to refuse a bad one before any work.

    Raises:
        ValueError: a value out of its range.
    """

    # of the last run
    matrix: AccuracyMatrix
    merge_seconds: list[float]  # by step, without loading, saving and scoring

    # set by auto_register_config
    shuffle_order: bool
    seed: int
    evaluate: Evaluate
    save_on_every_step: bool
    check_models: bool

    def __init__(
        self,
        shuffle_order: bool = True,
        seed: int = 42,
        evaluate: Evaluate = "diagonal",
        save_on_every_step: bool = True,
        check_models: bool = True,
        **kwargs: Any,
    ) -> None:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise ValueError(f"seed must be a whole number, got {seed!r}")
        if evaluate not in get_args(Evaluate):
            raise ValueError(f"evaluate must be one of {', '.join(get_args(Evaluate))}, got {evaluate!r}")
        for key, value in (
            ("shuffle_order", shuffle_order),
            ("save_on_every_step", save_on_every_step),
            ("check_models", check_models),
        ):
            if not isinstance(value, bool):
                raise ValueError(f"{key} must be true or false, got {value!r}")
        super().__init__(**kwargs)

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        """Called once, with the pretrained model and the names in merging order, before anything else."""

    def check_model(self, pretrained: nn.Module, model: nn.Module, name: str) -> None:
        """Raise ValueError, naming model and layer, for a model that cannot be merged."""

    def merge_step(self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module) -> nn.Module:
        """Merge model ``name``, number ``step`` (from 1), and return the new merged model.

        ``merged`` equals ``pretrained`` at step 1 and may be changed in place; the other two may not.
        """
        raise NotImplementedError

    def on_run_start(self) -> None:
        """Use the task pool that the model pool brings along, unless the user named one."""
        program, bundled = self._program, None
        if program is not None and program._modelpool is not None:
            bundled = program._modelpool.get("taskpool")
        if bundled is not None and isinstance(program.taskpool, DummyTaskPool) and not _taskpool_was_named():
            program.taskpool = program._instantiate_and_setup(
                bundled, compat_load_fn="fusion_bench.compat.taskpool.load_taskpool_from_config"
            )

    @torch.no_grad()
    def run(self, modelpool: BaseModelPool | Mapping[str, nn.Module], taskpool: Any = None) -> nn.Module:
        """Merge all models of a pool.

        Args:
            modelpool: FusionBench model pool, or a dict of models; ``_pretrained_`` is the pretrained one.
            taskpool: FusionBench task pool, or an evaluator that other runs share; default: the program's task pool.
                Without one nothing is scored.

        Returns:
            The merged model. :attr:`matrix` holds the scores.
        """
        if not isinstance(modelpool, BaseModelPool):
            modelpool = BaseModelPool(dict(modelpool))
        if not modelpool.has_pretrained:
            raise ValueError(f"the model pool has no '_pretrained_' model, only {modelpool.all_model_names}")
        if not modelpool.model_names:
            raise ValueError("the model pool is empty: there is no fine-tuned model to merge")
        if self.fabric.world_size > 1:
            raise ValueError("continual merging runs in one process: set fabric.devices=1")
        self._check_log_dir()
        if taskpool is None and self._program is not None:
            taskpool = self._program.taskpool
        scored = taskpool is not None and not isinstance(taskpool, DummyTaskPool)
        evaluator = taskpool if isinstance(taskpool, Evaluator) else Evaluator(taskpool) if scored else None

        names = task_order(modelpool.model_names, shuffle=self.shuffle_order, seed=self.seed)
        self.matrix = AccuracyMatrix(names)
        with self.profile("loading models"):
            pretrained = modelpool.load_pretrained_model()
        if not isinstance(pretrained, nn.Module):
            raise ValueError(f"the model pool must load torch modules, got {type(pretrained).__name__}")
        self.start(pretrained, names)
        self.check_model(pretrained, pretrained, "_pretrained_")
        if self.check_models:
            self._check_all(modelpool, pretrained, names)
        self._save_json("model_names.json", names)

        merged = deepcopy(pretrained)
        self.merge_seconds = []
        for step, name in enumerate(tqdm(names, desc="Merging models", disable=None), 1):
            with self.profile("loading models"):
                task = modelpool.load_model(name)
            if not self.check_models:
                self.check_model(pretrained, task, name)
            begin = time.perf_counter()
            with self.profile("merging"):
                merged = self.merge_step(step, name, pretrained, merged, task)
            del task
            self.merge_seconds.append(time.perf_counter() - begin)
            log.info("step %d of %d: merged '%s' in %.1f s", step, len(names), name, self.merge_seconds[-1])
            if self.save_on_every_step and self.log_dir is not None:
                with self.profile("saving"):
                    save_checkpoint(merged, Path(self.log_dir) / "checkpoints" / f"merged_model_{step - 1}")
            if evaluator is not None:
                with self.profile("evaluating"):
                    self._evaluate_step(evaluator, step, merged)

        if evaluator is not None:
            self._finish(modelpool)
        self.print_profile_summary()
        return merged

    def _check_log_dir(self) -> None:
        if self.log_dir is None:
            return
        try:
            with atomic_file(Path(self.log_dir) / "write_test") as file:
                file.touch()
            (Path(self.log_dir) / "write_test").unlink()
        except OSError as error:
            raise ValueError(f"the log directory '{self.log_dir}' can't be written: {error}") from error

    def _check_all(self, modelpool: BaseModelPool, pretrained: nn.Module, names: list[str]) -> None:
        with self.profile("checking models"):
            for name in tqdm(names, desc="Checking models", disable=None):
                self.check_model(pretrained, modelpool.load_model(name), name)

    def _evaluate_step(self, evaluator: Evaluator, step: int, merged: nn.Module) -> None:
        final = step == len(self.matrix.tasks)
        if not (tasks := tasks_to_score(self.matrix.tasks, step, self.evaluate)):
            return
        report = evaluator.report(merged, tasks, others=final)
        scores = {task: score(report[task]) for task in tasks if task in report}
        self.matrix.record(step, scores)
        self._save_json(f"report_{step - 1}.json", report)
        if self.fabric.loggers:
            self.log_dict({f"score/{task}": value for task, value in scores.items()}, step=step)
            if final:
                self.log_dict({"ACC": self.matrix.acc, "BWT": self.matrix.bwt}, step=step)
        if final and self._program is not None:
            self._program.taskpool = _ReportedTaskPool(evaluator.taskpool, merged, report)

    def _finish(self, modelpool: BaseModelPool) -> None:
        method = type(self).__name__
        print_matrix(self.matrix, title=f"{method}: score (%) of each task after each step")
        if self.log_dir is None:
            return
        packages = ("fusion-bench-nufilt", "fusion-bench", "torch", "transformers")
        about = {
            "method": method,
            "config": OmegaConf.to_container(self.config, resolve=True),
            "models": {name: _describe(modelpool, name) for name in ("_pretrained_", *self.matrix.tasks)},
            "merge_seconds": self.merge_seconds,
            "versions": {package: importlib.metadata.version(package) for package in packages},
        }
        save_matrix(self.matrix, Path(self.log_dir), about)
        log.info("accuracy_matrix.json, .csv and .png are in %s", self.log_dir)

    def _save_json(self, name: str, content: Any) -> None:
        if self.log_dir is not None:
            write_text(Path(self.log_dir) / name, json.dumps(content))


class _ReportedTaskPool:
    """Answers FusionBench's evaluation of the merged model, after ``run``, with the report that the last step made."""

    def __init__(self, taskpool: Any, model: nn.Module, report: Report) -> None:
        self.taskpool, self.model, self.report = taskpool, model, report

    def evaluate(self, model: nn.Module, *args: Any, **kwargs: Any) -> Report:
        return self.report if model is self.model else self.taskpool.evaluate(model, *args, **kwargs)


def _taskpool_was_named() -> bool:
    """Did the user choose a task pool on the command line? FusionBench's default one is a placeholder."""
    if not HydraConfig.initialized():
        return False
    return any(override.lstrip("+~").startswith("taskpool") for override in HydraConfig.get().overrides.task)


def _describe(modelpool: BaseModelPool, name: str) -> Any:
    """Where a model comes from: a hub name or folder, or the pool's config of it."""
    entry = modelpool._models[name]
    if isinstance(entry, str):
        return entry
    return type(entry).__name__ if isinstance(entry, nn.Module) else OmegaConf.to_container(entry, resolve=True)
