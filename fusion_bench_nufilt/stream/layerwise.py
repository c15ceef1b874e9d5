"""The FusionBench algorithm of every layer-wise method."""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
from fusion_bench import auto_register_config
from omegaconf import ListConfig
from safetensors.torch import load, save
from torch import Tensor, nn
from tqdm.auto import tqdm

from fusion_bench_nufilt.core import FusionConfig
from fusion_bench_nufilt.core.options import options_of, split_options, takes_options
from fusion_bench_nufilt.core.weights import is_finite
from fusion_bench_nufilt.layers import Heads, TargetConfig, check_model, coverage, merge_other_params, select_layers
from fusion_bench_nufilt.layers.models import check_related
from fusion_bench_nufilt.methods import Report, State, find_method
from fusion_bench_nufilt.pages.write import read_table
from fusion_bench_nufilt.storage.checkpoint import add_head, load_state, read_heads
from fusion_bench_nufilt.storage.files import write_text
from fusion_bench_nufilt.storage.schemas import Head, Manifest

from .algorithm import ContinualMergingAlgorithm
from .models import MERGED, PRETRAINED, config_of
from .protocol import DeviceConfig, ProtocolConfig

log = logging.getLogger(__name__)
_warn_once = cache(log.warning)  # once for all runs of a comparison


class LayerwiseMergingAlgorithm(ContinualMergingAlgorithm):
    """Merges the chosen layers by a method, everything else as ``other_params`` says, and writes ``layers.csv``.

    Args:
        layer_method: the name of a method in :data:`fusion_bench_nufilt.methods.METHODS`.
        **kwargs: the options of that method and of ``TargetConfig``, ``DeviceConfig`` and ``ProtocolConfig``.

    Raises:
        ValueError: a value is out of its range, or there is no such method or option; the message names it.
    """

    def __init__(self, layer_method: str, **kwargs: Any) -> None:
        self._kind = find_method(layer_method)
        plain = {key: list(value) if isinstance(value, ListConfig) else value for key, value in kwargs.items()}
        self._own: tuple[type[Any], ...] = (self._kind.Options, TargetConfig, DeviceConfig)
        made, protocol = split_options(self._own, {**self._kind.defaults, **plain})
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
        self.options, self.targets, self.device_config = (options_of(kind, self) for kind in self._own)
        self.task_heads: dict[str, Head] = {}
        self.head_tensors: dict[str, dict[str, Tensor]] = {}
        self._heads = Heads("none", {}, {})
        self._drawn: dict[str, Sequence[str]] = {}  # weights that a checkpoint lacks
        self._lacking: dict[str, list[str]] = {}  # those of them that are outside heads
        self._choose(pretrained)
        log.info("%s", self.method)

    def _choose(self, pretrained: nn.Module) -> None:
        """Choose the layers, without those of the heads that are known by now."""
        layers = select_layers(pretrained, self.targets.target_modules, self.targets.exclude_modules)
        self._layers = {layer: view for layer, view in layers.items() if not self._heads.of([view.key])}
        self._coverage = coverage(pretrained, self._layers, self.targets)
        self.method = self._kind(self.options, list(self._layers), self.seed)
        self._states: dict[str, State] = {}
        if not self.method.state_is_weight:
            self._states = {layer: self.method.start(layer, W) for layer, W in self._read(pretrained).items()}
        self._mean_counts: defaultdict[str, int] = defaultdict(int)
        self._reports: list[dict[str, Any]] = []  # the rows of layers.csv
        log.info("%s", self._coverage)
        for warning in (self._coverage.warning, self.method.warning([view.shape for view in self._layers.values()])):
            if warning:
                _warn_once("%s", warning)

    def _read(self, model: nn.Module) -> dict[str, Tensor]:
        return {layer: view.read(model) for layer, view in self._layers.items()}

    @property
    def solving_share(self) -> float | None:
        """The share of the merging time that the solver took; None for a method without one."""
        solving = sum(row.get("solving_seconds", 0.0) for row in self._reports)
        return solving / sum(row["seconds"] for row in self._reports) if solving else None

    def describe(self) -> dict[str, Any]:
        step = self.first_step + len(self.merge_seconds) - 1
        counts = {key: count for key, count in self._mean_counts.items() if count != step}
        return {"coverage": self._coverage.as_dict(), "mean_counts": counts, "heads": self.task_heads}

    def state(self) -> dict[str, Tensor]:
        return {f"{layer}.{name}": value for layer, state in self._states.items() for name, value in state.items()}

    def go_on_from(self, folder: Path | None, manifest: Manifest) -> None:
        step = manifest.get("step", self.first_step - 1)
        self._mean_counts = defaultdict(lambda: step, manifest.get("mean_counts", {}))
        self.task_heads = dict(manifest.get("heads", {}))
        self.files = {} if folder is None else read_heads(folder, manifest)
        self.head_tensors = {task: load(self.files[head["file"]]) for task, head in self.task_heads.items()}
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
            self._states[layer] = {name: saved[f"{layer}.{name}"].to(value) for name, value in state.items()}

    def _check(self, pretrained: nn.Module, model: nn.Module, drawn: Sequence[str], name: str) -> None:
        """Find the model's head before all other checks, which concern what is merged."""
        self._drawn[name], names = drawn, self._names(pretrained, model)
        shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        if name == PRETRAINED:
            known = {key: shape for key, shape in shapes.items() if key not in drawn}
            backbone = getattr(pretrained, "base_model_prefix", "")
            self._heads = Heads(self.targets.heads, known, config_of(pretrained), backbone)
            self._heads.keep(self.before.get("heads", {}).values())
            self._heads.add(name, shapes, config_of(pretrained), ())  # a head that its checkpoint lacks counts, too
        elif name != MERGED:
            before = self._heads.of(pretrained.state_dict())
            own = {base_name: shapes[key] for base_name, key in names.items() if key not in drawn}
            self._heads.add(name, own, config_of(model))
            is_late = not self._checked_first and self.first_step + len(self.merge_seconds) > 1
            if is_late and self._heads.of(pretrained.state_dict()) != before:
                heads = ", ".join(sorted(self._heads.modules))
                said = f"model '{name}' has a head of its own ({heads}), which the models before it had not"
                raise ValueError(f"{said}: set heads='{heads}', or leave check_models on")
        if self._heads.of(view.key for view in self._layers.values()):
            self._choose(pretrained)
        left = [base_name for base_name, key in names.items() if key in drawn and not self._heads.of([base_name])]
        self._lacking[name] = left
        super()._check(pretrained, _backbone(pretrained, model), left, name)

    def _names(self, pretrained: nn.Module, model: nn.Module) -> dict[str, str]:
        """Return the keys of a model by the pretrained model's names for them."""
        inside = "" if _backbone(pretrained, model) is model else f"{model.base_model_prefix}."
        return {key.removeprefix(inside): key for key in model.state_dict()}

    def check_model(self, pretrained: nn.Module, model: nn.Module, name: str) -> None:
        keys = dict.fromkeys(view.key for view in self._layers.values())
        others, mismatch = self.targets.other_params, self.targets.on_shape_mismatch
        heads = self._heads.of(model.state_dict())
        check_model(pretrained, model, keys, name=name, other_params=others, on_shape_mismatch=mismatch, heads=heads)
        check_related(pretrained, model, self._layers, name=name)

    def uses(self, key: str) -> bool:
        return any(view.key == key for view in self._layers.values())

    def merge_step(self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module) -> nn.Module:
        self._keep_head(name, pretrained, task)
        task, method, theta_0 = _backbone(pretrained, task), self.method, self._read(pretrained)
        states = self._states or {layer: {"weight": W} for layer, W in self._read(merged).items()}
        devices = self.device_config.choose(self.fabric.device)
        weigh = method.state_is_weight or self.is_used(step)
        added = method.add_each(states, theta_0, self._read(task), step=step, device=devices, weigh=weigh)
        bar = tqdm(added, total=len(self._layers), desc=f"Merging {name}", unit="layer", leave=False, disable=None)
        reports = {}
        for layer, state, reports[layer], weight in bar:
            if not method.state_is_weight:
                self._states[layer] = state
            if weight is not None:
                self._layers[layer].write(merged, weight)
        if self.targets.changes_others(step):
            if lacking := self._lacking.get(name, []):
                log.warning("'%s' is left out of the mean of %s, which its checkpoint lacks", name, ", ".join(lacking))
            heads = self._heads.of(merged.state_dict())
            merge_other_params(merged, task, self._layers, self._mean_counts, heads, lacking)
        self._report(step, name, reports)
        return merged

    def _keep_head(self, task: str, pretrained: nn.Module, model: nn.Module) -> None:
        names, state = self._names(pretrained, model), model.state_dict()
        head = [name for name in self._heads.of(names) if state[names[name]].is_floating_point()]
        if not head:
            return
        if drawn := [names[name] for name in head if names[name] in self._drawn.get(task, ())]:
            log.warning(
                "model '%s': its checkpoint has no head ('%s' was drawn at random): none is kept", task, drawn[0]
            )
            return
        tensors = {names[name]: state[names[name]].cpu().contiguous().clone() for name in head}
        if bad := [key for key, value in tensors.items() if not is_finite(value)]:
            raise ValueError(f"model '{task}', parameter '{bad[0]}' of its head has NaN or infinite values")
        name = add_head(self.task_heads, task, self._heads.modules_of(head), config_of(model))
        self.head_tensors[name] = tensors
        self.files = {**self.files, self.task_heads[name]["file"]: save(tensors)}

    def restore(self, step: int) -> None:
        if self.folder is not None and (file := self.folder.path / "layers.csv").is_file():
            try:
                rows = read_table(file, "task layer step")
                self._reports = rows[rows["step"] <= step].to_dict("records")
            except ValueError as error:
                log.warning("%s: it begins anew with step %d", error, step + 1)

    def _report(self, step: int, name: str, reports: Mapping[str, Report]) -> None:
        self._reports += [{"step": step, "task": name, "layer": layer, **row} for layer, row in reports.items()]
        if self.folder is None:
            return
        write_text(self.folder.path / "layers.csv", pd.DataFrame(self._reports).to_csv(index=False))
        if self.fabric.loggers:
            means = {key: sum(row[key] for row in reports.values()) / len(reports) for key in self.method.logged}
            self.log_dict({f"layers/{key}": mean for key, mean in means.items()}, step=step)


def _backbone(pretrained: nn.Module, model: nn.Module) -> nn.Module:
    """Return the part of a model that the pretrained model has, too: the backbone if that model has no head."""
    prefix = getattr(model, "base_model_prefix", "")
    part = getattr(model, prefix, None) if prefix else None
    bare = not any(key.startswith(f"{prefix}.") for key in pretrained.state_dict())
    return part if isinstance(part, nn.Module) and bare else model


@auto_register_config
@takes_options(FusionConfig, TargetConfig, DeviceConfig, ProtocolConfig)
class NufiltContinualMergingAlgorithm(LayerwiseMergingAlgorithm):
    """Null-space filtering for data-free continual model merging (Qiu et al., ICLR 2026).

    Args:
        **kwargs: the options of ``FusionConfig``, ``TargetConfig``, ``DeviceConfig`` and ``ProtocolConfig``.

    Raises:
        ValueError: a value is out of its range, or there is no such option; the message names it.

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
