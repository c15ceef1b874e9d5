"""
Null-Space Filtering for Data-Free Continual Model Merging.
Qiu et al., ICLR 2026, https://arxiv.org/abs/2509.21413

The mathematics is in ``core`` (torch only), which layers are merged in ``layers``; this file is the wiring.
"""

import dataclasses
import logging
import random
from collections import defaultdict
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig
from torch import nn
from tqdm.auto import tqdm

from fusion_bench import BaseAlgorithm, BaseModelPool, auto_register_config
from fusion_bench.mixins import LightningFabricMixin, SimpleProfilerMixin
from fusion_bench.utils.json import save_to_json

from .core.config import FusionConfig
from .core.fusion import LayerReport, fuse_each
from .core.options import split_options, takes_options
from .layers.models import check_model, merge_other_params
from .layers.selection import select_layers
from .layers.targets import TargetConfig

log = logging.getLogger(__name__)


@auto_register_config
@takes_options(FusionConfig, TargetConfig)
class NUFILTMerging(LightningFabricMixin, SimpleProfilerMixin, BaseAlgorithm):
    """Merges a stream of models one after another, without data, for any architecture.

    At no time are more than three models held: the pretrained, the merged and the new one.

    Args:
        shuffle_order: whether the models come in the order ``random.Random(seed).shuffle(names)``, otherwise in the
            pool's. Seeds 42 to 51 are the ten orders printed in the paper.
        seed: seed of the order and of the adapters' initial A.
        save_on_every_step: keep ``checkpoints/merged_model_{step}`` in the log directory.
        evaluate_on_every_step: write ``report_{step}.json``, the task pool's report, after every step.
        **kwargs: options of :class:`FusionConfig` and :class:`TargetConfig`.

    Raises:
        ValueError: a value out of its range; names the option.

    Examples:
        >>> algorithm = NUFILTMerging(shuffle_order=False)
        >>> merged = algorithm.run({"_pretrained_": base, "digits": digits, "letters": letters})
    """

    def __init__(
        self,
        shuffle_order: bool = True,
        seed: int = 42,
        save_on_every_step: bool = True,
        evaluate_on_every_step: bool = False,
        **kwargs: Any,
    ):
        plain = {
            key: list(value) if isinstance(value, ListConfig) else value
            for key, value in kwargs.items()
        }
        (self.fusion_config, self.targets), others = split_options(
            [FusionConfig, TargetConfig], plain
        )
        super().__init__(**others)

    @torch.no_grad()
    def run(self, modelpool: BaseModelPool | dict[str, nn.Module]) -> nn.Module:
        if not isinstance(modelpool, BaseModelPool):
            modelpool = BaseModelPool(modelpool)
        model_names = list(modelpool.model_names)
        if self.shuffle_order:
            random.Random(self.seed).shuffle(model_names)
        self._save_json(model_names, "model_names.json")

        with self.profile("loading models"):
            pretrained_model = modelpool.load_pretrained_model()
        self._layers = select_layers(
            pretrained_model, self.targets.target_modules, self.targets.exclude_modules
        )
        self._check(pretrained_model, pretrained_model, "_pretrained_")
        log.info(
            "NUFILT merges %d layers of each of %d models",
            len(self._layers),
            len(model_names),
        )

        merged_model = deepcopy(pretrained_model)
        self._mean_counts = defaultdict(int)
        for step, model_name in enumerate(tqdm(model_names, desc="Merging models")):
            with self.profile("loading models"):
                task_model = modelpool.load_model(model_name)
            self._check(pretrained_model, task_model, model_name)
            with self.profile("merging models"):
                reports = self._merge(
                    step, model_name, pretrained_model, merged_model, task_model
                )
            self._log_layers(step, reports)
            if self.save_on_every_step and self.log_dir is not None:
                with self.profile("saving models"):
                    merged_model.save_pretrained(
                        Path(self.log_dir) / "checkpoints" / f"merged_model_{step}"
                    )
            if self.evaluate_on_every_step:
                with self.profile("evaluating models"):
                    report = self._evaluate(merged_model, model_names[: step + 1])
                self._save_json(report, f"report_{step}.json")
        self.print_profile_summary()
        return merged_model

    def _check(self, pretrained_model: nn.Module, model: nn.Module, name: str) -> None:
        keys = dict.fromkeys(view.key for view in self._layers.values())
        others, mismatch = self.targets.other_params, self.targets.on_shape_mismatch
        check_model(
            pretrained_model,
            model,
            keys,
            name=name,
            other_params=others,
            on_shape_mismatch=mismatch,
        )

    def _merge(
        self,
        step: int,
        name: str,
        pretrained_model: nn.Module,
        merged_model: nn.Module,
        task_model: nn.Module,
    ) -> dict[str, LayerReport]:
        """Merge one model into ``merged_model``, in place."""

        def matrices(model: nn.Module) -> dict[str, torch.Tensor]:
            return {layer: view.read(model) for layer, view in self._layers.items()}

        reports = {}
        fused = fuse_each(
            matrices(pretrained_model),
            matrices(merged_model),
            matrices(task_model),
            self.fusion_config,
            seed=self.seed,
            step=step + 1,
            device=self.fabric.device,
        )
        for layer, weight, reports[layer] in tqdm(
            fused, total=len(self._layers), desc=f"Merging {name}", leave=False
        ):
            self._layers[layer].write(merged_model, weight)
        if self.targets.changes_others(step + 1):
            merge_other_params(
                merged_model, task_model, self._layers, self._mean_counts
            )
        return reports

    def _log_layers(self, step: int, reports: dict[str, LayerReport]) -> None:
        self._save_json(
            {layer: dataclasses.asdict(report) for layer, report in reports.items()},
            f"layers_{step}.json",
        )
        for key in (
            "task_norm",
            "merged_norm",
            "filtered_share",
            "overlap",
            "loss_before",
            "loss_after",
        ):
            mean = sum(getattr(report, key) for report in reports.values()) / len(
                reports
            )
            self.fabric.log(f"layers/{key}", mean, step=step)

    def _evaluate(self, merged_model: nn.Module, seen: list[str]) -> Any:
        """The task pool's report, for a pool of image tasks on what was merged so far."""
        taskpool = self._program.taskpool
        datasets = getattr(taskpool, "_test_datasets", None)
        if datasets is None:
            return taskpool.evaluate(deepcopy(merged_model))
        taskpool._is_setup = False
        taskpool._test_datasets = DictConfig({name: datasets[name] for name in seen})
        report = taskpool.evaluate(deepcopy(merged_model))
        taskpool._is_setup, taskpool._test_datasets = False, datasets
        return report

    def _save_json(self, content: Any, name: str) -> None:
        if self.log_dir is not None:
            save_to_json(content, Path(self.log_dir) / name)
