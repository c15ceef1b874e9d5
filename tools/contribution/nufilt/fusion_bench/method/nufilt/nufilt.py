"""
Null-Space Filtering for Data-Free Continual Model Merging.
Qiu et al., ICLR 2026, https://arxiv.org/abs/2509.21413

The mathematics is in ``config.py``, ``subspace.py``, ``adapter.py`` and ``step.py``
(torch only), one step on a layer in ``fusion.py``, which layers are merged in
``targets.py``; this file is the wiring.
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

from .config import StepConfig
from .fusion import fuse_layer
from .step import MEASURES
from .targets import select_layers

log = logging.getLogger(__name__)


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
        target_modules: Union[str, List[str]] = "auto",
        shuffle_order: bool = True,
        seed: int = 42,
        save_on_every_step: bool = True,
        evaluate_on_every_step: bool = True,
        **kwargs,
    ):
        """
        Merge a stream of models one after another, without data.

        At no time are more than three models held: the pretrained, the merged and the
        new one. The first eight arguments are those of :class:`StepConfig`; the
        defaults are the paper's: one setting for all models, task counts, orders.

        Args:
            target_modules (str | List[str]): what is merged; see :func:`select_layers`.
                All other parameters stay those of the pretrained model.
            shuffle_order (bool): merge in the order
                ``random.Random(seed).shuffle(names)``, otherwise in the pool's. Seeds
                42 to 51 are the ten orders of the paper.
            seed (int): seed of the order and of the adapters' initial A.
            save_on_every_step (bool): keep ``checkpoints/merged_model_{index}``, which
                counts from 0, as OPCM's do.
            evaluate_on_every_step (bool): write ``report_{index}.json``, the pool's
                report on the merged model.
        """
        self._step_config()  # refuses values out of their range
        super().__init__(**kwargs)

    def _step_config(self) -> StepConfig:
        names = [field.name for field in fields(StepConfig)]
        return StepConfig(**{name: getattr(self, name) for name in names})

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
        names = list(select_layers(pretrained_model, self.target_modules))
        log.info(f"NUFILT merges {len(names)} layers: {names[0]} to {names[-1]}")
        self._check(names, pretrained_model, pretrained_model, "_pretrained_")

        merged_model = deepcopy(pretrained_model)
        for step, model_name in enumerate(tqdm(model_names, desc="Merging models"), 1):
            with self.profile("loading models"):
                task_model = modelpool.load_model(model_name)
            self._check(names, pretrained_model, task_model, model_name)
            with self.profile("merging models"):
                models = (pretrained_model, merged_model, task_model)
                self._merge(step, names, *models)
            if self.save_on_every_step:
                with self.profile("saving models"):
                    self.save_merged_model(merged_model, step - 1)
            if self.evaluate_on_every_step and self._program is not None:
                with self.profile("evaluating models"):
                    report = self._program.taskpool.evaluate(deepcopy(merged_model))
                self._save_json(report, f"report_{step - 1}.json")
        self.print_profile_summary()
        return merged_model

    def _check(
        self,
        names: List[str],
        pretrained_model: nn.Module,
        model: nn.Module,
        label: str,
    ):
        """Refuse a model that can't be merged; the ValueError names the layer."""
        layers = dict(model.named_modules())
        for name in names:
            text = f"model '{label}', layer '{name}'"
            expected = tuple(pretrained_model.get_submodule(name).weight.shape)
            shape = None
            if name in layers:
                shape = tuple(layers[name].weight.shape)
            if shape != expected:
                raise ValueError(f"{text}: expected {expected}, got {shape}")
            if not layers[name].weight.isfinite().all():
                raise ValueError(f"{text} has NaN or infinite values")

    def _merge(
        self,
        step: int,
        names: List[str],
        pretrained_model: nn.Module,
        merged_model: nn.Module,
        task_model: nn.Module,
    ):
        """
        Merge one model into ``merged_model``, in place.

        On a CPU, each of torch's threads takes a layer and does its mathematics alone.
        That is faster than parallel mathematics on one layer, since eigenvalue solvers
        hardly scale, and the result does not depend on the number of threads, to the
        last bit.
        """
        device = self.fabric.device
        if device.type not in ("cpu", "cuda"):  # mps has no eigenvalue solver
            device = torch.device("cpu")
        models = (pretrained_model, merged_model, task_model)
        config = self._step_config()

        def merge_layer(name: str) -> Dict[str, float]:
            weights = [model.get_submodule(name).weight.data for model in models]
            layer = name.removeprefix("vision_model.")  # which transformers 5 drops
            weight, measures = fuse_layer(
                layer, *(x.to(device) for x in weights), config, self.seed, step
            )
            merged_model.get_submodule(name).weight.data.copy_(weight)
            return measures

        def single_threaded():
            torch.get_num_threads()  # the first call takes over the process's number
            torch.set_num_threads(1)

        threads = torch.get_num_threads()
        workers = threads if device.type == "cpu" else 1
        try:
            with ThreadPoolExecutor(workers, initializer=single_threaded) as pool:
                measures = pool.map(merge_layer, names)
                bar = tqdm(measures, "Merging layers", len(names), leave=False)
                reports = dict(zip(names, bar))
        finally:
            torch.set_num_threads(threads)
        self._save_json(reports, f"layers_{step - 1}.json")
        for key in MEASURES:
            mean = sum(report[key] for report in reports.values()) / len(reports)
            self.fabric.log(f"layers/{key}", mean, step=step)

    def save_merged_model(self, merged_model: nn.Module, index: int):
        if self.log_dir is None:
            return
        path = Path(self.log_dir) / "checkpoints" / f"merged_model_{index}"
        if hasattr(merged_model, "save_pretrained"):
            merged_model.save_pretrained(path)
        else:
            path.parent.mkdir(exist_ok=True)
            torch.save(merged_model.state_dict(), f"{path}.pt")

    def _save_json(self, content: Any, name: str):
        if self.log_dir is not None:
            save_to_json(content, Path(self.log_dir) / name)
