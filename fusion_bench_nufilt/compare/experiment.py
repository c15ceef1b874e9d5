"""What all runs of a comparison share: models, data and classification heads."""

import gc
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import lightning
import torch
from fusion_bench import RuntimeConstants
from fusion_bench.compat.method import load_algorithm_from_config
from fusion_bench.compat.modelpool import load_modelpool_from_config
from fusion_bench.compat.taskpool import load_taskpool_from_config
from fusion_bench.utils.parameters import count_parameters
from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fusion_bench_nufilt.continual.content import describe_config
from fusion_bench_nufilt.continual.errors import what_is_wrong
from fusion_bench_nufilt.continual.evaluation import (
    Evaluator,
    Report,
    SubsetIndices,
    score,
    unaveraged,
)
from fusion_bench_nufilt.continual.layerwise import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.continual.models import (
    MERGED,
    PRETRAINED,
    check_pool,
    fingerprint_of_stored,
    load_model,
    reason,
)
from fusion_bench_nufilt.pages.content import References, Scores, SeedRun
from fusion_bench_nufilt.pages.metrics import ALL_TEST_DATA, or_none
from fusion_bench_nufilt.utils.manifest import differences, in_one_line, package_versions

from .configs import as_json, compose_run, make, plain, quiet, taskpool_config

OnStep = Callable[..., Any]


class WatchingEvaluator(Evaluator):
    """An evaluator that notes the peak memory between scorings: that of merging, and of what stays
    loaded.

    It is what torch has allocated on a CUDA device; elsewhere, the process's resident memory, which
    Linux alone tells.
    """

    peak: int | None  # bytes since the last `watch`; None if unknown

    def __init__(
        self,
        taskpool: object,
        device: torch.device,
        subset: SubsetIndices | None = None,
        data: str = ALL_TEST_DATA,
    ) -> None:
        super().__init__(taskpool, subset, data)
        self._device = device
        self.watch()

    def watch(self) -> None:
        self.peak = 0 if reset_peak(self._device) else None

    def report(
        self, model: nn.Module, tasks: Sequence[str], *, further_tasks: bool = False
    ) -> Report:
        if self.peak is not None:
            self.peak = max(self.peak, read_peak(self._device))
        try:
            return super().report(model, tasks, further_tasks=further_tasks)
        finally:
            # What scoring took is not a peak of merging.
            reset_peak(self._device)


def reset_peak(device: torch.device) -> bool:
    """Reset the peak of the memory in use; return False where it is not known."""
    try:
        if device.type == "cuda":
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # this resets the peak, and nothing else
    except OSError:
        return False
    return True


def read_peak(device: torch.device) -> int:
    """Return the peak of the memory in use since it was last reset, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return 1024 * int(kilobytes)


@contextmanager
def solver_seconds() -> Iterator[list[float]]:
    """Yield a list of seconds that add up to those from each torch optimizer's creation to its last
    step.
    """
    seconds: list[float] = []
    seen: WeakKeyDictionary[Optimizer, float] = WeakKeyDictionary()
    init = Optimizer.__init__

    def begin(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        init(optimizer, *args, **kwargs)
        seen[optimizer] = time.perf_counter()

    def step(optimizer: Optimizer, *_: Any) -> None:
        now = time.perf_counter()
        seconds.append(now - seen[optimizer])
        seen[optimizer] = now

    hook = register_optimizer_step_post_hook(step)
    try:
        with patch.object(Optimizer, "__init__", begin):
            yield seconds
    finally:
        hook.remove()


def part_of_test_data(validation: bool, count: int) -> list[int]:
    """Return a fifth of the numbers below ``count``, drawn with a fixed seed, or all others."""
    # The same for all methods and seeds: what is chosen on the one part is scored on the other.
    fifth = set(random.Random(42).sample(range(count), max(1, count // 5)))
    return [number for number in range(count) if (number in fifth) is validation]


class Experiment:
    """The pools that `fusion_bench` composes, made when they are first needed, and methods run on
    them.

    With ``validation``, a fifth of each task's test data is scored; with False, the rest; with
    None, all.
    """

    def __init__(self, config: DictConfig, validation: bool | None = None) -> None:
        self._config = config
        self._validation = validation
        self._digests: dict[str, str] = {}
        #: What the words come to, for people; what results depend on is in :attr:`settings`.
        self.composed = {
            "modelpool": plain(config.modelpool),
            "taskpool": plain(taskpool_config(config)),
        }

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What every run depends on besides its models and its method: the task pool, and what its
        data and the training data of the model pool are known by. This loads the test data.
        """
        settings: dict[str, Any] = {**self.evaluator.description}
        settings["training_data"] = describe_config(self._config.modelpool.get("train_datasets"))
        return as_json(settings)

    @contextmanager
    def _fast_dev_run(self) -> Iterator[None]:
        """Have FusionBench's pools and methods do what ``fast_dev_run`` of this experiment says."""
        with patch.object(RuntimeConstants, "debug", bool(self._config.get("fast_dev_run"))):
            yield

    @cached_property
    def fabric(self) -> lightning.Fabric:
        """One device and no logger: runs write no files of their own."""
        config = self._config.fabric
        # Of several processes, FusionBench's pools would each report a part of the data.
        try:
            return lightning.Fabric(
                accelerator=config.accelerator, precision=config.precision, devices=1
            )
        except Exception as error:
            line = what_is_wrong(error, self._config)
            if line is None:
                raise
            raise ValueError(line) from error

    @cached_property
    def modelpool(self) -> Any:
        return make("modelpool", self._config.modelpool, self.fabric, load_modelpool_from_config)

    @cached_property
    def evaluator(self) -> WatchingEvaluator:
        """Made before any model is loaded: it compares the names of models and tasks."""
        config = taskpool_config(self._config)
        subset = None
        data = ALL_TEST_DATA
        if self._validation is not None:
            subset = partial(part_of_test_data, self._validation)
            fifth = "a fifth of the test data"
            data = fifth if self._validation else "the test data without the fifth of --validation"
        with self._fast_dev_run():
            taskpool = make("taskpool", config, self.fabric, load_taskpool_from_config)
            evaluator = WatchingEvaluator(taskpool, self.fabric.device, subset, data)
        evaluator.compare_names(self.tasks)
        return evaluator

    def make_method(self, config: dict[str, Any]) -> Any:
        return make("method", DictConfig(config), self.fabric, load_algorithm_from_config)

    @property
    def tasks(self) -> list[str]:
        check_pool(self.modelpool)
        return list(self.modelpool.model_names)

    @cached_property
    def parameters(self) -> int:
        return count_parameters(self.load(PRETRAINED)[0])[1]

    def changes(self, merged: nn.Module) -> tuple[int, float]:
        """Return how many tensors of the pretrained model have other values in a merged one, and
        the share of its parameters that these hold.
        """
        changed_tensors = 0
        changed_elements = 0
        pretrained, missing_keys = self.load(PRETRAINED)
        weights = dict(pretrained.named_parameters())
        for name, parameter in merged.named_parameters():
            # A mixture of experts has the pretrained MLP under a longer name.
            weight = weights.get(name.replace(".base_model.", "."))
            if weight is None or name in missing_keys:
                continue
            if not torch.equal(weight.to(parameter), parameter):
                changed_tensors += 1
                changed_elements += parameter.numel()
        return changed_tensors, changed_elements / self.parameters

    @property
    def digests(self) -> dict[str, str]:
        """What the weights of every model are known by."""
        names = [PRETRAINED, *self.tasks]
        if getattr(self.modelpool, "has_merged", False):
            names.append(MERGED)
        return {name: self.digest(name) for name in sorted(names)}

    def digest(self, name: str) -> str:
        if name not in self._digests:
            self.load(name)
        return self._digests[name]

    def load(self, name: str) -> tuple[nn.Module, list[str]]:
        """Load a model, note its digest, and tell which of its weights were drawn at random."""
        model, missing_keys = load_model(self.modelpool, name)
        if name not in self._digests:
            self._digests[name] = fingerprint_of_stored(model, missing_keys)
        return model, missing_keys

    @cached_property
    def description(self) -> dict[str, Any]:
        """What every run depends on besides its method: :attr:`settings`, and the content of the
        models, which are all loaded.
        """
        return {**self.settings, "weights": self.digests}

    def refuse_other(self, description: dict[str, Any]) -> None:
        """Raise a ValueError if the pools have other content than where a description was made: in
        another process, or on another machine, a name may stand for something else.
        """
        differing = differences(description, self.description)
        if differing:
            raise ValueError(
                "the process of a run has other models or data under the same names than the one "
                f"that compares: {in_one_line(differing)}"
            )

    def score_single_models(self, on_step: OnStep) -> References:
        """Score the pretrained model on all T tasks and each fine-tuned one on its own, T + 1 steps
        in all.
        """
        references: References = {"pretrained": {}, "individual": {}}
        references["pretrained"] = self._scores_of(PRETRAINED, self.tasks)
        on_step()
        for task in self.tasks:
            references["individual"] |= self._scores_of(task, [task])
            on_step()
        return references

    @torch.no_grad()
    def _scores_of(self, name: str, tasks: Sequence[str]) -> Scores:
        model, _ = self.load(name)
        with self._fast_dev_run():
            report = self.evaluator.report(model, tasks)
        return {task: or_none(score(report.get(task, {}))) for task in tasks}

    def run(self, config: dict[str, Any], on_step: OnStep = lambda *_: None) -> SeedRun:
        """Merge the stream by a method's configuration, which has the seed; an error is part of the
        result.
        """
        device = self.fabric.device
        device_name = str(device)
        if device.type == "cuda":
            device_name = torch.cuda.get_device_name(device)
        environment = {**package_versions(), "device": device_name}
        try:
            # Some methods draw from the global generators.
            lightning.seed_everything(config["seed"], verbose=False)
            algorithm = self.make_method(config)
            self.evaluator.watch()
            with self._fast_dev_run(), solver_seconds() as solving:
                merged = algorithm.run(self.modelpool, self.evaluator, on_step=on_step)
            seconds = algorithm.merge_seconds
            solving_seconds = sum(solving) if solving else None
            if isinstance(algorithm, LayerwiseMergingAlgorithm):
                solving_share = algorithm.solving_share
                if solving_share is not None:
                    # Layers are solved side by side, and their seconds add up to more than these.
                    solving_seconds = solving_share * sum(seconds)
            _, parameters = count_parameters(merged)
            changed_tensors, changed_share = self.changes(merged)
            return SeedRun(
                config,
                algorithm.matrix.tasks,
                algorithm.matrix.rows(),
                seconds,
                environment=environment,
                solving_seconds=solving_seconds,
                data_seconds=algorithm.data_seconds,
                memory=self.evaluator.peak,
                parameters=parameters,
                extra_parameters=parameters - self.parameters,
                changed_tensors=changed_tensors,
                changed_share=changed_share,
                unaveraged=unaveraged(algorithm.scores.last_report, algorithm.matrix.missing),
            )
        except Exception as error:
            trace = traceback.format_exc()
            return SeedRun(config, environment=environment, error=reason(error), traceback=trace)
        finally:
            gc.collect()
            torch.cuda.empty_cache()


def run_alone(
    overrides: tuple[str, ...],
    validation: bool | None,
    description: dict[str, Any],
    config: dict[str, Any],
) -> SeedRun:
    """Run a method in a process of its own, which keeps the pools, with data and heads, for the
    next run; pools of another description are refused.
    """
    with quiet():
        experiment = _experiment(overrides, validation)
        experiment.refuse_other(description)
        return experiment.run(config)


@cache
def _experiment(overrides: tuple[str, ...], validation: bool | None) -> Experiment:
    return Experiment(compose_run(overrides), validation)
