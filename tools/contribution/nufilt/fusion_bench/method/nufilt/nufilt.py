"""
Null-Space Filtering for Data-Free Continual Model Merging.
Qiu et al., ICLR 2026, https://arxiv.org/abs/2509.21413

The mathematics is in ``config.py``, ``subspace.py``, ``adapter.py`` and ``step.py`` (torch
only), one step on a layer in ``fusion.py``, which layers are merged in ``layers.py``; this
file is the wiring.
"""

import logging
import random
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any, Dict, List, Literal, Union

import torch
from torch import nn
from tqdm.auto import tqdm

from fusion_bench import BaseAlgorithm, BaseModelPool, auto_register_config
from fusion_bench.mixins import LightningFabricMixin, SimpleProfilerMixin
from fusion_bench.utils.json import save_to_json

from .config import FusionConfig
from .fusion import fuse_layer
from .layers import average_others, merged_shares, select_layers
from .step import MEASURES

log = logging.getLogger(__name__)

# the names of the authors' release
RENAMED = {
    "null_r": "null_rank",
    "lora_r": "lora_rank",
    "grad_r": "task_rank",
    "lora_layer": "target_modules",
}


@auto_register_config
class NUFILTMerging(
    LightningFabricMixin,
    SimpleProfilerMixin,
    BaseAlgorithm,
):
    def __init__(
        self,
        null_rank: Union[int, float] = 128,
        lora_rank: Union[int, float] = 64,
        task_rank: Union[int, float] = 8,
        lr: float = 1e-3,
        max_steps: int = 50,
        init_std: float = 0.02,
        null_space: Union[bool, Literal["zero"]] = True,
        first_task: Literal["paper", "release"] = "paper",
        solver: Literal["adam", "closed_form"] = "adam",
        ridge: float = 10.0,
        target_modules: Union[str, List[str]] = "auto",
        exclude_modules: Union[str, List[str], None] = None,
        other_params: Literal["pretrained", "first", "mean"] = "pretrained",
        shuffle_order: bool = True,
        seed: int = 42,
        save_on_every_step: bool = True,
        evaluate_on_every_step: bool = False,
        **kwargs,
    ):
        """
        Merge a stream of models one after another, without data, for any architecture.

        At no time are more than three models held: the pretrained, the merged and the new
        one. The first ten arguments are those of :class:`FusionConfig`; the defaults are
        the paper's: one setting for all models, task counts, orders.

        Args:
            target_modules (str | List[str]): what is merged; see :func:`select_layers`.
            exclude_modules (str | List[str] | None): what is left out, named in the same way.
            other_params (str): all other parameters are those of the "pretrained" model, of
                the "first" task, or the "mean" over the tasks.
            shuffle_order (bool): merge in the order ``random.Random(seed).shuffle(names)``,
                otherwise in the pool's. Seeds 42 to 51 are the ten orders of the paper.
            seed (int): seed of the order and of the adapters' initial A.
            save_on_every_step (bool): keep ``checkpoints/merged_model_{step}``.
            evaluate_on_every_step (bool): write ``report_{step}.json``, the task pool's
                report on the tasks that are merged so far.
        """
        for theirs, ours in RENAMED.items():
            if theirs in kwargs:
                log.warning(f"'{theirs}' is called '{ours}' here")
                setattr(self, ours, kwargs.pop(theirs))
        if self.other_params not in ("pretrained", "first", "mean"):
            raise ValueError(
                f"other_params must be pretrained, first or mean, got {self.other_params!r}"
            )
        self._fusion_config()
        super().__init__(**kwargs)

    def _fusion_config(self) -> FusionConfig:
        names = [field.name for field in fields(FusionConfig)]
        return FusionConfig(**{name: getattr(self, name) for name in names})

    @torch.no_grad()
    def run(self, modelpool: Union[BaseModelPool, Dict[str, nn.Module]]) -> nn.Module:
        if not isinstance(modelpool, BaseModelPool):
            modelpool = BaseModelPool(modelpool)
        model_names = list(modelpool.model_names)
        if self.shuffle_order:
            random.Random(self.seed).shuffle(model_names)
        self._save_json(model_names, "model_names.json")

        with self.profile("loading models"):
            pretrained_model = modelpool.load_pretrained_model()
        self._select_layers(pretrained_model)

        merged_model = deepcopy(pretrained_model)
        self._means = {}
        for step, model_name in enumerate(tqdm(model_names, desc="Merging models")):
            with self.profile("loading models"):
                task_model = modelpool.load_model(model_name)
            self._check(pretrained_model, task_model, model_name)
            with self.profile("merging models"):
                self._merge(step, pretrained_model, merged_model, task_model)
            if self.save_on_every_step:
                with self.profile("saving models"):
                    self.save_merged_model(merged_model, step)
            if self.evaluate_on_every_step and self._program is not None:
                with self.profile("evaluating models"):
                    report = self._evaluate(merged_model, model_names[: step + 1])
                self._save_json(report, f"report_{step}.json")
        self.print_profile_summary()
        return merged_model

    def _select_layers(self, pretrained_model: nn.Module):
        self._layers = select_layers(
            pretrained_model, self.target_modules, self.exclude_modules
        )
        self._check(pretrained_model, pretrained_model, "_pretrained_")
        share, in_blocks = merged_shares(pretrained_model, self._layers)
        text = (
            f"NUFILT merges {len(self._layers)} layers, {share:.1%} of all parameters and "
            f"{in_blocks:.1%} of those in blocks; the others are {self.other_params}"
        )
        level = logging.INFO
        if self.target_modules == "auto" and in_blocks < 0.5:
            level = logging.WARNING
        log.log(level, text)

    def _check(self, pretrained_model: nn.Module, model: nn.Module, name: str):
        """Refuse a model that can't be merged; the ValueError names the parameter."""
        state = model.state_dict()
        in_layers = {layer.key for layer in self._layers.values()}
        for key, expected in pretrained_model.state_dict().items():
            what = f"model '{name}', parameter '{key}'"
            if key not in state or state[key].shape != expected.shape:
                shape = tuple(state[key].shape) if key in state else "nothing"
                text = f"{what}: expected {tuple(expected.shape)}, got {shape}"
                raise ValueError(text)
            taken = key in in_layers or self.other_params != "pretrained"
            if taken and not state[key].isfinite().all():
                raise ValueError(f"{what} has NaN or infinite values")

    def _merge(
        self,
        step: int,
        pretrained_model: nn.Module,
        merged_model: nn.Module,
        task_model: nn.Module,
    ):
        """
        Merge one model into ``merged_model``, in place.

        On a CPU, each of torch's threads takes a layer and does its mathematics alone. That
        is faster than parallel mathematics on one layer, since eigenvalue solvers hardly
        scale, and the result does not depend on the number of threads, to the last bit.
        """
        device = self.fabric.device
        if device.type not in ("cpu", "cuda"):
            log.warning(f"{device} has no eigenvalue solver: the CPU computes")
            device = torch.device("cpu")
        models = (pretrained_model, merged_model, task_model)
        config = self._fusion_config()

        def merge_layer(name: str) -> Dict[str, float]:
            layer = self._layers[name]
            weights = [layer.read(model).to(device) for model in models]
            weight, measures = fuse_layer(name, *weights, config, self.seed, step + 1)
            layer.write(merged_model, weight)
            return measures

        def single_threaded():
            torch.get_num_threads()  # the first call takes over the process's number
            torch.set_num_threads(1)

        threads = torch.get_num_threads()
        workers = threads if device.type == "cpu" else 1
        try:
            with ThreadPoolExecutor(workers, initializer=single_threaded) as pool:
                measures = pool.map(merge_layer, self._layers)
                bar = tqdm(measures, "Merging layers", len(self._layers), leave=False)
                reports = dict(zip(self._layers, bar))
        finally:
            torch.set_num_threads(threads)

        if self.other_params == "mean" or (self.other_params == "first" and step == 0):
            models = merged_model, task_model
            average_others(*models, self._layers, step + 1, self._means)
        self._save_json(reports, f"layers_{step}.json")
        for key in MEASURES:
            mean = sum(report[key] for report in reports.values()) / len(reports)
            self.fabric.log(f"layers/{key}", mean, step=step)

    def save_merged_model(self, merged_model: nn.Module, step: int):
        if self.log_dir is None:
            return
        path = Path(self.log_dir) / "checkpoints" / f"merged_model_{step}"
        if hasattr(merged_model, "save_pretrained"):
            merged_model.save_pretrained(path)
        else:
            path.parent.mkdir(exist_ok=True)
            torch.save(merged_model.state_dict(), f"{path}.pt")

    def _evaluate(self, merged_model: nn.Module, seen: List[str]) -> Any:
        """Return the task pool's report, on the tasks seen so far if it can be narrowed."""
        taskpool = self._program.taskpool
        model = deepcopy(merged_model)
        if hasattr(taskpool, "_all_task_names"):  # Flan-T5 calls glue-cola cola
            attribute = "_all_task_names"
            tasks = taskpool._all_task_names
            seen = set(seen) | {task.split("glue-")[-1] for task in seen}
            narrowed = [task for task in tasks if task in seen]
        elif hasattr(taskpool, "_test_datasets"):
            attribute = "_test_datasets"
            tasks = taskpool._test_datasets
            known = {name: tasks[name] for name in seen if name in tasks}
            narrowed = type(tasks)(known)
        else:
            return taskpool.evaluate(model)
        try:
            setattr(taskpool, attribute, narrowed)
            taskpool._is_setup = False
            return taskpool.evaluate(model)
        finally:
            setattr(taskpool, attribute, tasks)
            taskpool._is_setup = False

    def _save_json(self, content: Any, name: str):
        if self.log_dir is not None:
            save_to_json(content, Path(self.log_dir) / name)
