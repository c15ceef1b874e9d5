"""The protocol that every continual merging method runs under."""

import json
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from fusion_bench import BaseAlgorithm, BaseModelPool, auto_register_config
from fusion_bench.mixins import LightningFabricMixin
from fusion_bench.taskpool import DummyTaskPool
from omegaconf import OmegaConf
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from fusion_bench_nufilt.merge.checks import options_warning
from fusion_bench_nufilt.methods.options import Evaluate, ProtocolConfig
from fusion_bench_nufilt.models.configurations import check_configuration
from fusion_bench_nufilt.models.fit import check_module
from fusion_bench_nufilt.models.source import config_of
from fusion_bench_nufilt.pages.metrics import AccuracyMatrix, percent
from fusion_bench_nufilt.pages.page import PAGE
from fusion_bench_nufilt.pages.tables import print_matrix
from fusion_bench_nufilt.pages.write import try_write_report
from fusion_bench_nufilt.utils.files import Input, Manifest, write_text
from fusion_bench_nufilt.utils.manifest import (
    Difference,
    base_of,
    is_same_model,
    load_checkpoint,
    package_versions,
    tasks_of,
)
from fusion_bench_nufilt.utils.options import (
    split_options,
    takes_options,
    unknown,
    with_scope,
)

from . import models as pools
from .content import Items, describe_items
from .evaluation import Evaluator, RunScores
from .models import (
    CHANGED,
    MERGED,
    PRETRAINED,
    identify,
    load_model,
    merged_before,
    source_of,
)
from .program import ReportedTaskPool, finish_trackers, use_bundled_taskpool
from .run_folder import RunFolder, open_run_folder
from .stopwatch import CHECKING, DATA, LOADING, MERGING, SAVING, SCORING, Stopwatch

log = logging.getLogger(__name__)
OnStep = Callable[[int, nn.Module], Any]
# The order is compared by itself, and so is the number of models in `_merged_`.
_DESCRIBED_OTHERWISE = ("shuffle_order", "num_merged")


class LostStepError(ValueError):
    """A finished step is missing or damaged; the message says what of it."""


@auto_register_config
@takes_options(ProtocolConfig)
class ContinualMergingAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """Merges a stream of models one after another, scores the result, saves every step.

    A subclass says how one model is merged (:meth:`merge_step`) and which models it refuses
    (:meth:`check_model`). At no time are more than three models held: the pretrained, the merged
    and the new one. A pool with a ``_merged_`` model goes on from there; step numbers count the
    models that it already holds. A log directory with steps of the same run is gone on from in the
    same way, from its last whole step.

    Args:
        **kwargs: the options of :class:`ProtocolConfig`.

    Raises:
        ValueError: a value is out of its range, or there is no such option; the message names it.
    """

    option_kinds: tuple[type, ...]  # the dataclasses of its options, set by takes_options

    # These describe the last run.
    folder: RunFolder | None  # the log directory
    modelpool: BaseModelPool
    scores: RunScores | None  # None without a task pool
    stopwatch: Stopwatch
    merge_seconds: list[float]  # by step, without data, loading, checking, saving and scoring
    merged_folder: Path | None  # of `_merged_`, if it is in one
    merged_manifest: Manifest  # its manifest, empty where there is none
    first_step: int  # the number of the first model of the stream: 1 without `_merged_`
    names: list[str]  # the models of the stream, in merging order
    files: Mapping[str, bytes]  # further files saved with each step, by path
    missing_in_pretrained: Sequence[str]  # keys that the pretrained model's checkpoint lacks
    on_step: OnStep | None

    # These are set by auto_register_config.
    shuffle_order: bool
    seed: int
    evaluate: Evaluate
    save_on_every_step: bool
    check_models: bool
    num_merged: int | None
    verify: bool

    def __init__(self, **kwargs: Any) -> None:
        # FusionBench would report these as unused.
        _, other_options = split_options(self.option_kinds, kwargs)
        option_names = set(self._config_mapping.values())
        unknown_names = other_options.keys() - option_names
        if unknown_names:
            message = unknown("option", min(unknown_names), option_names)
            raise ValueError(f"{type(self).__name__}: {message}")
        super().__init__(**other_options)

    @property
    def name(self) -> str:
        """The name of the method in tables and logs."""
        return type(self).__name__

    def training_data(self) -> Mapping[str, Any]:
        """Load and return the data sets, by task, that the weights depend on; called once, before
        any model is loaded. Loading is the part ``DATA`` of the stopwatch. A ValueError names a
        task whose data can't be loaded.
        """
        return {}

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        """Prepare a run; called once, with the pretrained model and the names in merging order."""

    def check_model(
        self, pretrained: nn.Module, model: nn.Module, name: str, missing_keys: Sequence[str] = ()
    ) -> None:
        """Raise a ValueError, naming model and tensor, if the model cannot be merged: other shapes,
        or NaN.

        ``missing_keys`` are of weights that its checkpoint lacks, which were drawn at random.
        """
        pools.refuse_missing_keys(name, missing_keys, can_exclude=False)
        check_module(pretrained, model, name)
        method = self.merged_manifest.get("method", self.name)
        if name == MERGED and method != self.name:
            log.warning("%s", options_warning(name, [Difference("method", method, self.name)]))

    def merge_step(
        self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module
    ) -> nn.Module:
        """Merge model ``name``, number ``step`` (from 1), and return the new merged model.

        ``merged`` equals ``pretrained`` at step 1 and may be changed in place; the other two may
        not.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that are saved beside each step to go on from it."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Return what the manifest of a step says about the merge, besides its order, inputs and
        settings.
        """
        return {}

    def go_on_from(self, folder: Path | None, manifest: Manifest) -> None:
        """Take over what was kept with a merged model, or raise ValueError; then a stream goes on
        from it.

        ``folder`` is the checkpoint of the model, of ``_merged_`` or of a step of this very run. It
        is None where ``_merged_`` is given by itself, and then ``manifest`` is empty.
        """

    def prepare(self, merged: nn.Module) -> nn.Module:
        """Return the model to merge into, given a copy of the pretrained one, with the parameters
        that its weights need: what was merged before is loaded into it.
        """
        return merged

    @property
    def matrix(self) -> AccuracyMatrix:
        """The scores of the run; without a task pool, none is filled in."""
        if self.scores is None:
            return AccuracyMatrix(self.names)
        return self.scores.matrix

    @property
    def data_seconds(self) -> float | None:
        """The seconds of setting up data, also before a run was resumed; None if there are none."""
        seconds = self._data_seconds_before + self.stopwatch.seconds.get(DATA, 0.0)
        return seconds or None

    @property
    def taskpool(self) -> Any:
        """The task pool that scores the run, if there is one."""
        if self.scores is None:
            return None
        return self.scores.evaluator.taskpool

    def on_run_start(self) -> None:
        """Use the task pool that the model pool brings along, unless the user named one."""
        use_bundled_taskpool(self._program)

    def on_run_end(self) -> None:
        """Have the program's trackers write what they hold."""
        finish_trackers(self.fabric.loggers, "success")

    @torch.no_grad()
    def run(
        self,
        modelpool: BaseModelPool | Mapping[str, nn.Module],
        taskpool: Any = None,
        on_step: OnStep | None = None,
    ) -> nn.Module:
        """Merge all models of a pool and return the merged model; :attr:`matrix` holds the scores.

        Args:
            modelpool: FusionBench model pool, or a dict of torch modules; ``_pretrained_`` is the
                pretrained one, and ``_merged_``, if there is one, what was merged before.
            taskpool: FusionBench task pool, or an evaluator that other runs share; by default, the
                program's task pool. Without one, nothing is scored.
            on_step: called after each step is saved and scored, with its number and the merged
                model, for scores of your own; later steps change this model.
        """
        modelpool = pools.as_pool(modelpool)
        try:
            with open_run_folder(self.log_dir) as self.folder:
                return self._run(modelpool, taskpool, on_step)
        except BaseException:
            if self._program is not None:
                # Also after Ctrl-C: else MLflow has it running for ever, and a CSV lacks rows.
                finish_trackers(self.fabric.loggers, "failed")
            raise

    def _run(self, modelpool: BaseModelPool, taskpool: Any, on_step: OnStep | None) -> nn.Module:
        # FusionBench's pools share the data out to processes, and each reports its own part.
        if self.fabric.world_size > 1:
            raise ValueError("continual merging runs in one process: set fabric.devices=1")
        self.modelpool = modelpool
        self.files = {}
        self.merged_folder, self.merged_manifest, self.first_step = merged_before(
            modelpool, self.num_merged, verify=self.verify
        )
        names = task_order(modelpool.model_names, shuffle=self.shuffle_order, seed=self.seed)
        self.names = names
        self.stopwatch = Stopwatch()
        self.merge_seconds = []
        self._merging_before = 0.0  # seconds of merging before the current step
        self._data_seconds_before = 0.0  # those of the processes that a resumed run had before
        self.on_step = on_step
        self._has_begun = False
        self._saved_step: Manifest | None = None  # of that from which the run goes on
        self._training_data: dict[str, Items] = {}
        self._inputs: dict[str, Input] = {}
        for name in modelpool.all_model_names:
            self._inputs[name] = {"name": name, "source": source_of(modelpool, name)}
        if self.folder is not None:
            # By the options alone, before data are loaded, which may take minutes.
            self.folder.refuse_other_run(self._description())
        self.scores = self._scores(taskpool)
        # Data that are missing are told before any model is downloaded.
        scoring = None
        if self.scores is not None:
            with self.stopwatch.part(SCORING):
                # As JSON has it, to be compared with what is read from a file.
                scoring = json.loads(json.dumps(self.scores.evaluator.description))
        training_data = self.training_data()
        if self.folder is not None:
            for name, data in training_data.items():
                self._training_data[name] = describe_items(data)
            # By the data, too; `begin` compares the weights as well.
            self.folder.refuse_other_run({**self._description(), "scoring": scoring})
            self._saved_step = self.folder.newest_step(self.first_step, self._last_step)
        # Its download may take minutes.
        log.info("loading %s", PRETRAINED)
        pretrained, self.missing_in_pretrained = self._load(modelpool, PRETRAINED)
        # `check_model` needs the layers to merge, which a layer-wise method chooses here.
        self.start(pretrained, names)
        self.check_model(pretrained, pretrained, PRETRAINED, self.missing_in_pretrained)
        # A run that goes on must know all weights, to tell whether they are those of before.
        self._checked_first = self.check_models or self._saved_step is not None
        if self._checked_first:
            with self.stopwatch.part(CHECKING):
                for name in tqdm(names, desc="Checking models", leave=False, disable=None):
                    model, missing_keys = self._load(modelpool, name)
                    self._check(pretrained, model, name, missing_keys)
                    del model  # before the next one is loaded
        if self.folder is not None:
            self._has_begun = True
            self.folder.begin({**self._description(), "scoring": scoring})
            write_text(self.folder.path / "model_names.json", json.dumps(names))
        merged = self.merge_stream(modelpool, pretrained, names)
        if self.scores is not None:
            self._finish(self.scores, merged)
        if self._program is not None:
            print("\n".join(self._summary(merged)))
        return merged

    def _scores(self, taskpool: Any) -> RunScores | None:
        """Return the scorer of this run, or None without a task pool."""
        if taskpool is None and self._program is not None:
            taskpool = self._program.taskpool
        if taskpool is None or isinstance(taskpool, DummyTaskPool):
            return None
        evaluator = taskpool if isinstance(taskpool, Evaluator) else Evaluator(taskpool)
        evaluator.compare_names(self.names)
        # The tasks of `_merged_` that the pool can score stand before those of the stream.
        earlier_tasks = []
        for task in self.merged_manifest.get("tasks", []):
            if task not in self.names and evaluator.has(task):
                earlier_tasks.append(task)
        return RunScores(
            evaluator=evaluator,
            matrix=AccuracyMatrix([*earlier_tasks, *self.names]),
            earlier=len(earlier_tasks),
            evaluate=self.evaluate,
            first_step=self.first_step,
            folder=self.folder,
            log_dict=self.log_dict if self.fabric.loggers else None,
        )

    def merge_stream(
        self, modelpool: BaseModelPool, pretrained: nn.Module, names: list[str]
    ) -> nn.Module:
        """Merge models one after another, calling :meth:`finish_step` after each; return the last
        merged model.
        """
        previous = None
        if MERGED in modelpool.all_model_names:
            previous = self._load_merged(modelpool, pretrained)
        merged = self.prepare(deepcopy(pretrained))
        if previous is not None:
            merged.load_state_dict(previous.state_dict())
            if self.scores is not None:
                with self.stopwatch.part(SCORING):
                    self.scores.take_earlier_scores(self.merged_folder)
                    self.scores.score_earlier_tasks(previous)
            # At no time are more than three models held.
            del previous
        num_finished = self.take_saved_step(merged)
        next_step = self.first_step + num_finished
        unfinished = list(enumerate(names[num_finished:], next_step))
        for step, name in tqdm(unfinished, "Merging models", disable=None):
            task, missing_keys = self._load(modelpool, name)
            if not self._checked_first:
                self._check(pretrained, task, name, missing_keys)
            with self.stopwatch.part(MERGING):
                merged = self.merge_step(step, name, pretrained, merged, task)
            del task
            self.finish_step(step, merged)
        return merged

    def _load_merged(self, modelpool: BaseModelPool, pretrained: nn.Module) -> nn.Module:
        """Load and check ``_merged_``, and take over what was kept with it."""
        previous, missing_keys = self._load(modelpool, MERGED)
        self._check(pretrained, previous, MERGED, missing_keys)
        if self.verify and self.is_of_this_base is False:
            raise ValueError(
                f"'{self._inputs[MERGED]['source']}' was merged from another '{PRETRAINED}' model "
                f"than the pool's; {CHANGED}"
            )
        self.go_on_from(self.merged_folder, self.merged_manifest)
        return previous

    @property
    def is_of_this_base(self) -> bool | None:
        """Whether ``_merged_`` was made from the pool's pretrained model; None if nothing says
        so.
        """
        base = base_of(self.merged_manifest)
        if base is None:
            return None
        return is_same_model(base, self._inputs[PRETRAINED])

    def take_saved_step(self, merged: nn.Module) -> int:
        """Give ``merged`` the weights of the last whole step in the log directory, and enter the
        scores of the steps so far; return how many models of the stream are in it.
        """
        if self._saved_step is None:
            return 0
        manifest = self._saved_step
        step = manifest["step"]
        log.info("going on after step %d", step)
        self.merge_seconds = manifest["merge_seconds"]
        self._data_seconds_before = manifest.get("data_seconds", 0.0)
        if self.scores is not None:
            for finished_step in range(self.first_step, step):
                self._score_finished_step(self.scores, finished_step, merged)
        # After earlier steps, which may have been loaded into `merged` to be scored.
        self._load_step(manifest, merged)
        if self.scores is not None:
            with self.stopwatch.part(SCORING):
                self.scores.score_step(step, lambda: merged)
        return step - self.first_step + 1

    def _score_finished_step(self, scores: RunScores, step: int, merged: nn.Module) -> None:
        """Enter the scores of a step before the last whole one; ``merged`` is changed if they need
        its model.
        """

        def load_model_of_step() -> nn.Module:
            assert self.folder is not None
            try:
                manifest = self.folder.read_step(step)
            except ValueError as error:
                raise LostStepError(str(error)) from error
            self._load_step(manifest, merged)
            return merged

        try:
            with self.stopwatch.part(SCORING):
                scores.score_step(step, load_model_of_step)
        except LostStepError as error:
            log.warning("the scores of step %d are lost: it has no report, and %s", step, error)

    def _load_step(self, manifest: Manifest, merged: nn.Module) -> None:
        assert self.folder is not None
        folder = self.folder.checkpoint(manifest["step"])
        with self.stopwatch.part(LOADING):
            load_checkpoint(merged, folder)
            self.go_on_from(folder, manifest)

    def _check(
        self, pretrained: nn.Module, model: nn.Module, name: str, missing_keys: Sequence[str]
    ) -> None:
        """Check a model of the pool, by its configuration and by its tensors."""
        warnings = check_configuration(
            name,
            config_of(model),
            config_of(pretrained),
            verify=self.verify,
            remedy="set method.verify=false",
        )
        for warning in warnings:
            log.warning("%s", warning)
        self.check_model(pretrained, model, name, missing_keys)

    @property
    def _last_step(self) -> int:
        return self.first_step - 1 + len(self.names)

    @property
    def _kept(self) -> RunFolder | None:
        """The folder that keeps every step, if one does."""
        if self.save_on_every_step:
            return self.folder
        return None

    def is_used(self, step: int) -> bool:
        """Return whether the model after a step is saved, scored, handed to ``on_step`` or
        returned.
        """
        # A weight that nobody reads is not computed: N tasks at once then cost one eigenproblem.
        is_saved = self._kept is not None
        is_scored = self.scores is not None and bool(self.scores.tasks(step))
        is_handed_over = self.on_step is not None
        is_returned = step == self._last_step
        return is_saved or is_scored or is_handed_over or is_returned

    def finish_step(self, step: int, merged: nn.Module) -> None:
        """Save and score the model that a step has made, and note the seconds of merging that it
        took.
        """
        merging = self.stopwatch.seconds.get(MERGING, 0.0)
        seconds = merging - self._merging_before
        self._merging_before = merging
        self.merge_seconds.append(seconds)
        merged_names = self.names[: step - self.first_step + 1]
        log.info(
            "step %d: merged '%s' (%d of %d) in %.1f s",
            step,
            merged_names[-1],
            len(merged_names),
            len(self.names),
            seconds,
        )
        if self.folder is not None:
            # An earlier run's would pass for this one's.
            self.folder.delete_report(step)
        if self._kept is not None:
            manifest = self._description()
            manifest["step"] = step
            manifest["tasks"] = [*self.merged_manifest.get("tasks", []), *merged_names]
            own_tasks = [{**self._inputs[name], "name": name} for name in merged_names]
            manifest["task_inputs"] = [*tasks_of(self.merged_manifest), *own_tasks]
            manifest["merge_seconds"] = self.merge_seconds
            if self.data_seconds is not None:
                manifest["data_seconds"] = self.data_seconds
            manifest.update(self.describe())
            # Saved first: a run that ends while it is scored goes on from here.
            with self.stopwatch.part(SAVING):
                self._kept.save_step(step, merged, manifest, self.state(), self.files)
        if self.scores is not None:
            with self.stopwatch.part(SCORING):
                self.scores.score_step(step, lambda: merged)
        if self.on_step is not None:
            self.on_step(step, merged)

    def _load(self, modelpool: BaseModelPool, name: str) -> tuple[nn.Module, Sequence[str]]:
        """Load a model and note what it is known by; refuse a task that is in the merge already."""
        with self.stopwatch.part(LOADING):
            model, missing_keys = load_model(modelpool, name)
            if "loaded" not in self._inputs[name]:
                self._inputs[name].update(identify(modelpool, name, model, missing_keys))
                # Results of other models are told from this run's by them.
                if self.folder is not None and self._has_begun:
                    self.folder.refuse_other_run(self._description())
                if self.verify and name != PRETRAINED:
                    self._refuse_merged_task(name)
        return model, missing_keys

    def _refuse_merged_task(self, name: str) -> None:
        """Refuse a model that is in ``_merged_`` already, or has two names in the pool."""
        task = self._inputs[name]
        if task["loaded"] == self._inputs[PRETRAINED]["loaded"]:
            return  # it changes nothing, however often
        for other_name, other in self._inputs.items():
            if other_name != name and other.get("loaded") == task["loaded"]:
                raise ValueError(
                    f"model '{name}' is also model '{other_name}' of the pool: leave one out, or "
                    "set method.verify=false"
                )
        if name == MERGED:
            return  # after one task, it may be that task
        earlier_tasks = tasks_of(self.merged_manifest)
        for step, saved in enumerate(earlier_tasks, self.first_step - len(earlier_tasks)):
            if is_same_model(saved, task):
                raise ValueError(
                    f"model '{name}' is in '{MERGED}' already, as step {step} ('{saved['name']}'): "
                    "leave it out, or set method.verify=false"
                )

    def _description(self) -> dict[str, Any]:
        """Return all that the models after each step depend on: a run is resumed only if none of it
        has changed.
        """
        settings: Any = OmegaConf.to_container(self.config, resolve=True)
        # What is of the run may be another when it goes on: it changes no weight.
        for key in ("_target_", *_DESCRIBED_OTHERWISE, *with_scope(self.option_kinds, "run")):
            settings.pop(key, None)
        settings["models_before"] = self.first_step - 1
        return {
            "method": self.name,
            "order": self.names,
            "inputs": self._inputs,
            "settings": settings,
            "training_data": self._training_data,
            "versions": package_versions(),
        }

    def _finish(self, scores: RunScores, merged: nn.Module) -> None:
        """Print the accuracy matrix and save it in the log directory, with its page."""
        if self._program is not None:
            # FusionBench prints this report last, so that a run ends with its metrics and the page.
            report = scores.final_report()
            self._program.taskpool = ReportedTaskPool(self.taskpool, merged, report)
        scored = scores.evaluator.scored
        title = f"{self.name}: score (%) of each task after each step, on {scored}"
        print_matrix(scores.matrix, title=title)
        if self.folder is None:
            return
        about = {
            "method": self.name,
            "config": OmegaConf.to_container(self.config, resolve=True),
            "models": {name: model["source"] for name, model in self._inputs.items()},
            "merge_seconds": self.merge_seconds,
            "data_seconds": self.data_seconds,
            "versions": package_versions(),
            "scored": scored,
        }
        scores.matrix.save(self.folder.path, about)
        try_write_report(self.folder.path)

    def _summary(self, merged: nn.Module) -> list[str]:
        """Return the last lines of a run: its scores, its files and how to load its model."""
        lines = []
        if self.scores is not None:
            acc = self.scores.matrix.shown("ACC")
            bwt = self.scores.matrix.shown("BWT")
            lines.append(f"ACC    {acc}, the mean score of the final model in per cent")
            lines.append(f"BWT    {bwt}, the mean change of a task since its own step")
            before, now = self.scores.means_of_earlier()
            if not math.isnan(before):
                lines.append(
                    f"before {percent(before)}, the mean score of the tasks of {MERGED}; now "
                    f"{percent(now)}"
                )
        if self._kept is not None:
            folder = self._kept.checkpoint(self._last_step)
            lines.append(f"model  {folder}")
            if isinstance(merged, PreTrainedModel):
                lines.append(f'       {type(merged).__name__}.from_pretrained("{folder}")')
        if self.folder is not None and (self.folder.path / PAGE).is_file():
            lines.append(f"page   {self.folder.path / PAGE}")
        seconds = self.stopwatch.seconds
        seconds_by_part = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
        lines.append(f"time   {sum(seconds.values()):.1f} s: {seconds_by_part}")
        return lines


def task_order(names: Sequence[str], *, shuffle: bool, seed: int) -> list[str]:
    """Return the names in the order of the run, the same as that of FusionBench's continual methods
    for the seed.
    """
    order = list(names)
    if shuffle:
        random.Random(seed).shuffle(order)
    return order
