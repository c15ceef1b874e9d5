"""NUFILT as a FusionBench algorithm."""

import csv
import dataclasses
import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from fusion_bench import auto_register_config
from omegaconf import ListConfig
from torch import nn
from tqdm.auto import tqdm

from fusion_bench_nufilt.continual import ContinualMergingAlgorithm
from fusion_bench_nufilt.core import FusionConfig, LayerReport, fuse_each
from fusion_bench_nufilt.core.config import FirstTask, OtherParams, Solver
from fusion_bench_nufilt.files import write_text
from fusion_bench_nufilt.targets import check_model, layer_name, merge_other_params, select_layers

log = logging.getLogger(__name__)


@auto_register_config
class NufiltContinualMergingAlgorithm(ContinualMergingAlgorithm):
    """Null-space filtering for data-free continual model merging (Qiu et al., ICLR 2026).

    Args:
        null_rank, lora_rank, task_rank, lr, max_steps, init_std, null_space, target_modules, exclude_modules,
            other_params, first_task, solver, ridge: see :class:`fusion_bench_nufilt.core.FusionConfig`.
        **kwargs: the protocol, see :class:`fusion_bench_nufilt.continual.ContinualMergingAlgorithm`.

    Examples:
        >>> algorithm = NufiltContinualMergingAlgorithm(shuffle_order=False)
        >>> merged = algorithm.run({"_pretrained_": base, "digits": digits, "letters": letters})
    """

    def __init__(
        self,
        null_rank: int = 128,
        lora_rank: int = 64,
        task_rank: int = 8,
        lr: float = 1e-3,
        max_steps: int = 50,
        init_std: float = 0.02,
        null_space: bool | Literal["zero"] = True,
        target_modules: str | Sequence[str] = "auto",
        exclude_modules: str | Sequence[str] | None = None,
        other_params: OtherParams = "pretrained",
        first_task: FirstTask = "paper",
        solver: Solver = "adam",
        ridge: float = 10.0,
        **kwargs: Any,
    ) -> None:
        self.fusion_config = FusionConfig(
            null_rank=null_rank,
            lora_rank=lora_rank,
            task_rank=task_rank,
            lr=lr,
            max_steps=max_steps,
            init_std=init_std,
            null_space=null_space,
            target_modules=_plain(target_modules),
            exclude_modules=_plain(exclude_modules),
            other_params=other_params,
            first_task=first_task,
            solver=solver,
            ridge=ridge,
        )
        super().__init__(**kwargs)

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        config = self.fusion_config
        self._layers = select_layers(pretrained, config.target_modules, config.exclude_modules)
        self._rows: list[list[Any]] = []  # of layers.csv
        kept = sum(1 for _ in pretrained.parameters()) - len(self._layers)
        log.info("merging %d layers; %d other parameters: %s", len(self._layers), kept, config.other_params)

    def check_model(self, pretrained: nn.Module, model: nn.Module, name: str) -> None:
        check_model(pretrained, model, list(self._layers), name=name)

    def merge_step(self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module) -> nn.Module:
        def layers(model: nn.Module) -> dict[str, torch.Tensor]:
            return {layer_name(key): model.get_parameter(key).detach() for key in self._layers}

        keys = {layer_name(key): key for key in self._layers}
        reports = {}
        fused = fuse_each(
            layers(pretrained),
            layers(merged),
            layers(task),
            self.fusion_config,
            seed=self.seed,
            step=step,
            device=self.fabric.device,
        )
        bar = tqdm(fused, total=len(keys), desc=f"Merging {name}", unit="layer", leave=False, disable=None)
        for layer, weight, reports[layer] in bar:
            merged.get_parameter(keys[layer]).data.copy_(weight)
        merge_other_params(merged, task, self._layers, self.fusion_config.other_params, step)
        self._report_layers(step, name, reports)
        return merged

    def restore(self, step: int) -> None:
        if (file := self._layers_file()) is not None and file.is_file():
            rows = list(csv.reader(io.StringIO(file.read_text())))[1:]
            self._rows = [row for row in rows if int(row[0]) <= step]

    def _layers_file(self) -> Path | None:
        return None if self.log_dir is None else Path(self.log_dir) / "layers.csv"

    def _report_layers(self, step: int, name: str, reports: dict[str, LayerReport]) -> None:
        self._rows += [[step, name, layer, *dataclasses.astuple(report)] for layer, report in reports.items()]
        if (file := self._layers_file()) is None:
            return
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["step", "task", "layer", *(field.name for field in dataclasses.fields(LayerReport))])
        writer.writerows(self._rows)
        write_text(file, text.getvalue())
        if self.fabric.loggers:
            means = {
                f"layers/{key}": sum(getattr(report, key) for report in reports.values()) / len(reports)
                for key in ("task_norm", "merged_norm", "filtered_share", "overlap", "loss_before", "loss_after")
            }
            self.log_dict(means, step=step)


def _plain(patterns: Any) -> Any:
    return list(patterns) if isinstance(patterns, ListConfig) else patterns
