"""The FusionBench algorithm of every layer-wise method."""

import logging
from collections import defaultdict
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
from fusion_bench import auto_register_config
from omegaconf import ListConfig
from torch import Tensor, nn
from tqdm.auto import tqdm

from fusion_bench_nufilt.core import FusionConfig
from fusion_bench_nufilt.core.options import split_options, takes_options
from fusion_bench_nufilt.layers import TargetConfig, check_model, coverage, merge_other_params, select_layers
from fusion_bench_nufilt.methods import Report, State, find_method
from fusion_bench_nufilt.storage.checkpoint import Manifest, load_state
from fusion_bench_nufilt.storage.files import write_text

from .algorithm import ContinualMergingAlgorithm
from .protocol import DeviceConfig, ProtocolConfig

log = logging.getLogger(__name__)


class LayerwiseMergingAlgorithm(ContinualMergingAlgorithm):
    """Merges the chosen layers by a method, everything else as ``other_params`` says, and writes ``layers.csv``.

    Args:
        layer_method: the name of a method in :data:`fusion_bench_nufilt.methods.METHODS`.
        **kwargs: the options of that method and of ``TargetConfig``, ``DeviceConfig`` and ``ProtocolConfig``.

    Raises:
        ValueError: a value is out of its range, or there is no such method or option; names it.
    """

    def __init__(self, layer_method: str, **kwargs: Any) -> None:
        self._kind = find_method(layer_method)
        plain = {key: list(value) if isinstance(value, ListConfig) else value for key, value in kwargs.items()}
        own = (self._kind.Options, TargetConfig, DeviceConfig)
        made, protocol = split_options(own, {**self._kind.targets, **plain})
        self.options, self.targets, self.device_config = made
        self._config_mapping = type(self)._config_mapping.copy()
        for options in ({"layer_method": layer_method}, *map(vars, made)):
            for key, value in options.items():
                self._config_mapping[key] = key
                setattr(self, key, value)
        super().__init__(**protocol)

    @property
    def name(self) -> str:
        return self._kind.label

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        self._layers = select_layers(pretrained, self.targets.target_modules, self.targets.exclude_modules)
        self._coverage = coverage(pretrained, self._layers, self.targets)
        self.method = self._kind(self.options, list(self._layers), self.seed)
        self._states: dict[str, State] = {}
        if not self.method.state_is_weight:
            self._states = {layer: self.method.start(layer, W) for layer, W in self._read(pretrained).items()}
        self._mean_counts: defaultdict[str, int] = defaultdict(int)
        self._reports: list[dict[str, Any]] = []  # the rows of layers.csv
        log.info("%s", self._coverage)
        if self._coverage.warning:
            log.warning("%s", self._coverage.warning)

    def _read(self, model: nn.Module) -> dict[str, Tensor]:
        return {layer: view.read(model) for layer, view in self._layers.items()}

    @property
    def solving_share(self) -> float | None:
        """Share of the layers' seconds that a solver took; None for a method without one."""
        solving = sum(row.get("solving_seconds", 0.0) for row in self._reports)
        return solving / sum(row["seconds"] for row in self._reports) if solving else None

    def describe(self) -> dict[str, Any]:
        step = self.first_step + len(self.merge_seconds) - 1
        counts = {key: count for key, count in self._mean_counts.items() if count != step}
        return {"coverage": self._coverage.as_dict(), "mean_counts": counts}

    def state(self) -> dict[str, Tensor]:
        return {f"{layer}.{name}": value for layer, state in self._states.items() for name, value in state.items()}

    def go_on_from(self, folder: Path | None, manifest: Manifest) -> None:
        step = manifest.get("step", self.first_step - 1)
        self._mean_counts = defaultdict(lambda: step, manifest.get("mean_counts", {}))
        if self.method.state_is_weight:
            return
        saved = {} if folder is None else load_state(folder)
        missing = self.state().keys() - saved.keys()
        if missing or len(saved) > len(self.state()):
            what = f"lacks '{min(missing)}'" if missing else "is of more layers"
            raise ValueError(
                f"the state of {self.name} beside the merged model in '{folder}' {what}: this method goes on from its "
                "own merges of the same layers only; merge again from the start"
            )
        for layer, state in self._states.items():
            self._states[layer] = {name: saved[f"{layer}.{name}"].to(value.device) for name, value in state.items()}

    def check_model(self, pretrained: nn.Module, model: nn.Module, name: str) -> None:
        keys = dict.fromkeys(view.key for view in self._layers.values())
        others, mismatch = self.targets.other_params, self.targets.on_shape_mismatch
        check_model(pretrained, model, keys, name=name, other_params=others, on_shape_mismatch=mismatch)

    def uses(self, key: str) -> bool:
        return self.targets.other_params != "pretrained" or any(view.key == key for view in self._layers.values())

    def merge_step(self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module) -> nn.Module:
        method, theta_0 = self.method, self._read(pretrained)
        states = self._states or {layer: {"weight": W} for layer, W in self._read(merged).items()}
        devices = self.device_config.choose(self.fabric.device)
        added = method.add_each(states, theta_0, self._read(task), step=step, device=devices)
        bar = tqdm(added, total=len(self._layers), desc=f"Merging {name}", unit="layer", leave=False, disable=None)
        reports = {}
        for layer, state, reports[layer] in bar:
            if method.state_is_weight:
                self._layers[layer].write(merged, state["weight"])
            else:
                self._states[layer] = state
        if not method.state_is_weight and self.is_used(step):
            for layer, W in method.weigh_each(self._states, theta_0, device=devices):
                self._layers[layer].write(merged, W)
        if self.targets.changes_others(step):
            merge_other_params(merged, task, self._layers, self._mean_counts)
        self._report(step, name, reports)
        return merged

    def restore(self, step: int) -> None:
        if self.folder is not None and (file := self.folder.path / "layers.csv").is_file():
            try:
                rows = pd.read_csv(file, float_precision="round_trip")
                self._reports = rows[rows["step"] <= step].to_dict("records")
            except (ValueError, KeyError, TypeError) as error:
                log.warning("'%s' is damaged (%s): it begins anew with step %d", file, error, step + 1)

    def _report(self, step: int, name: str, reports: Mapping[str, Report]) -> None:
        self._reports += [{"step": step, "task": name, "layer": layer, **row} for layer, row in reports.items()]
        if self.folder is None:
            return
        write_text(self.folder.path / "layers.csv", pd.DataFrame(self._reports).to_csv(index=False))
        if self.fabric.loggers:
            means = {key: sum(row[key] for row in reports.values()) / len(reports) for key in self.method.logged}
            self.log_dict({f"layers/{key}": mean for key, mean in means.items()}, step=step)


@auto_register_config
@takes_options(FusionConfig, TargetConfig, DeviceConfig, ProtocolConfig)
class NufiltContinualMergingAlgorithm(LayerwiseMergingAlgorithm):
    """Null-space filtering for data-free continual model merging (Qiu et al., ICLR 2026).

    Args:
        **kwargs: the options of ``FusionConfig``, ``TargetConfig``, ``DeviceConfig`` and ``ProtocolConfig``.

    Raises:
        ValueError: a value is out of its range, or there is no such option; names it.

    Examples:
        >>> algorithm = NufiltContinualMergingAlgorithm(shuffle_order=False)
        >>> merged = algorithm.run({"_pretrained_": base, "digits": digits, "letters": letters})
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("nufilt", **kwargs)

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        if find_spec("fusion_bench.method.nufilt") is not None:
            log.info("this is NUFILT of fusion_bench_nufilt; FusionBench's own is method=nufilt/nufilt")
        super().start(pretrained, names)
