"""What methods share that merge a model layer by layer."""

import csv
import dataclasses
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from omegaconf import ListConfig
from torch import Tensor, nn
from tqdm.auto import tqdm

from fusion_bench_nufilt.continual import ContinualMergingAlgorithm
from fusion_bench_nufilt.core.options import split_options
from fusion_bench_nufilt.layers import TargetConfig, check_model, coverage, merge_other_params, select_layers
from fusion_bench_nufilt.storage.files import write_text

log = logging.getLogger(__name__)

Layers = dict[str, Tensor]


def split_plain(kinds: Sequence[type], options: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """:func:`split_options` of what a YAML file says."""
    plain = {key: list(value) if isinstance(value, ListConfig) else value for key, value in options.items()}
    return split_options(kinds, plain)


class LayerwiseMergingAlgorithm(ContinualMergingAlgorithm):
    """Merges the chosen layers one by one, everything else as ``other_params`` says, and writes ``layers.csv``.

    A subclass says how a layer is merged (:meth:`fuse`).
    """

    targets: TargetConfig
    logged: ClassVar[tuple[str, ...]] = ("task_norm", "merged_norm")  # of the layers' reports, their means by step

    def fuse(self, step: int, pretrained: Layers, merged: Layers, task: Layers) -> Iterator[tuple[str, Tensor, Any]]:
        """Yield name, new weight and report (a dataclass) of each layer; all models have the same layers."""
        raise NotImplementedError

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        targets = self.targets
        self._layers = select_layers(pretrained, targets.target_modules, targets.exclude_modules)
        self._coverage = coverage(pretrained, self._layers, targets)
        self._rows: list[list[Any]] = []  # of layers.csv
        self._seconds = (0.0, 0.0)  # of all layers in this process: in a solver, and together
        log.info("%s", self._coverage)
        if self._coverage.warning:
            log.warning("%s", self._coverage.warning)

    @property
    def solving_share(self) -> float | None:
        """Share of the layers' seconds that a solver took; None for a method without one."""
        solving, seconds = self._seconds
        return solving / seconds if solving else None

    def describe(self) -> dict[str, Any]:
        return {"coverage": self._coverage.as_dict()}

    def check_model(self, pretrained: nn.Module, model: nn.Module, name: str) -> None:
        keys = dict.fromkeys(view.key for view in self._layers.values())
        others, mismatch = self.targets.other_params, self.targets.on_shape_mismatch
        check_model(pretrained, model, keys, name=name, other_params=others, on_shape_mismatch=mismatch)

    def uses(self, key: str) -> bool:
        return self.targets.other_params != "pretrained" or any(view.key == key for view in self._layers.values())

    def merge_step(self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module) -> nn.Module:
        def layers(model: nn.Module) -> Layers:
            return {layer: view.read(model) for layer, view in self._layers.items()}

        reports = {}
        fused = self.fuse(step, layers(pretrained), layers(merged), layers(task))
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

    def _report_layers(self, step: int, name: str, reports: Mapping[str, Any]) -> None:
        self._rows += [[step, name, layer, *dataclasses.astuple(report)] for layer, report in reports.items()]
        for report in reports.values():
            solving, seconds = self._seconds
            self._seconds = solving + getattr(report, "solving_seconds", 0.0), seconds + report.seconds
        if self.folder is None:
            return
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        fields = dataclasses.fields(next(iter(reports.values())))
        writer.writerow(["step", "task", "layer", *(field.name for field in fields)])
        writer.writerows(self._rows)
        write_text(self.folder.path / "layers.csv", text.getvalue())
        if self.fabric.loggers:
            means = {
                f"layers/{key}": sum(getattr(report, key) for report in reports.values()) / len(reports)
                for key in self.logged
            }
            self.log_dict(means, step=step)
