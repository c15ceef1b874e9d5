"""NUFILT as a FusionBench algorithm."""

import csv
import dataclasses
import io
import logging
from typing import Any

import torch
from fusion_bench import auto_register_config
from omegaconf import ListConfig
from torch import nn
from tqdm.auto import tqdm

from fusion_bench_nufilt.continual import ContinualMergingAlgorithm, ProtocolConfig
from fusion_bench_nufilt.core import FusionConfig, LayerReport, fuse_each
from fusion_bench_nufilt.core.options import split_options, takes_options
from fusion_bench_nufilt.files import write_text
from fusion_bench_nufilt.layers import TargetConfig, check_model, coverage, merge_other_params, select_layers

log = logging.getLogger(__name__)


@auto_register_config
@takes_options(FusionConfig, TargetConfig, ProtocolConfig)
class NufiltContinualMergingAlgorithm(ContinualMergingAlgorithm):
    """Null-space filtering for data-free continual model merging (Qiu et al., ICLR 2026).

    Args:
        **kwargs: options of :class:`fusion_bench_nufilt.core.FusionConfig`,
            :class:`fusion_bench_nufilt.layers.TargetConfig` and
            :class:`fusion_bench_nufilt.continual.ProtocolConfig`.

    Raises:
        ValueError: a value out of its range, or an option that there is not; names it.

    Examples:
        >>> algorithm = NufiltContinualMergingAlgorithm(shuffle_order=False)
        >>> merged = algorithm.run({"_pretrained_": base, "digits": digits, "letters": letters})
    """

    def __init__(self, **kwargs: Any) -> None:
        plain = {key: list(value) if isinstance(value, ListConfig) else value for key, value in kwargs.items()}
        (self.fusion_config, self.targets), protocol = split_options([FusionConfig, TargetConfig], plain)
        super().__init__(**protocol)

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        targets = self.targets
        self._layers = select_layers(pretrained, targets.target_modules, targets.exclude_modules)
        self._coverage = coverage(pretrained, self._layers, targets)
        self._rows: list[list[Any]] = []  # of layers.csv
        log.info("%s", self._coverage)
        if self._coverage.warning:
            log.warning("%s", self._coverage.warning)

    def describe(self) -> dict[str, Any]:
        return {"coverage": self._coverage.as_dict()}

    def check_model(self, pretrained: nn.Module, model: nn.Module, name: str) -> None:
        keys = dict.fromkeys(view.key for view in self._layers.values())
        check_model(pretrained, model, keys, name=name, on_shape_mismatch=self.targets.on_shape_mismatch)

    def merge_step(self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module) -> nn.Module:
        def layers(model: nn.Module) -> dict[str, torch.Tensor]:
            return {layer: view.read(model) for layer, view in self._layers.items()}

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
        bar = tqdm(fused, total=len(self._layers), desc=f"Merging {name}", unit="layer", leave=False, disable=None)
        for layer, weight, reports[layer] in bar:
            self._layers[layer].write(merged, weight)
        merge_other_params(merged, task, self._layers, self.targets.other_params, step)
        self._report_layers(step, name, reports)
        return merged

    def restore(self, step: int) -> None:
        if self.folder is not None and (file := self.folder.path / "layers.csv").is_file():
            rows = list(csv.reader(io.StringIO(file.read_text())))[1:]
            self._rows = [row for row in rows if int(row[0]) <= step]

    def _report_layers(self, step: int, name: str, reports: dict[str, LayerReport]) -> None:
        self._rows += [[step, name, layer, *dataclasses.astuple(report)] for layer, report in reports.items()]
        if self.folder is None:
            return
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["step", "task", "layer", *(field.name for field in dataclasses.fields(LayerReport))])
        writer.writerows(self._rows)
        write_text(self.folder.path / "layers.csv", text.getvalue())
        if self.fabric.loggers:
            means = {
                f"layers/{key}": sum(getattr(report, key) for report in reports.values()) / len(reports)
                for key in ("task_norm", "merged_norm", "filtered_share", "overlap", "loss_before", "loss_after")
            }
            self.log_dict(means, step=step)
