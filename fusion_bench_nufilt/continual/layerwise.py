"""The FusionBench algorithm of every layer-wise method."""

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
from fusion_bench import auto_register_config
from omegaconf import ListConfig
from safetensors.torch import load
from torch import Tensor, nn
from tqdm.auto import tqdm

from fusion_bench_nufilt.merge.beside import has_state, mean_key, state_tensors, stored_keys
from fusion_bench_nufilt.merge.checks import check_made_from, check_state, check_task
from fusion_bench_nufilt.merge.encode import state_to_keep
from fusion_bench_nufilt.merge.engine import MergedLayer, merge_layers
from fusion_bench_nufilt.merge.heads import describe_heads, find_head, new_heads, take_head
from fusion_bench_nufilt.merge.others import average_others
from fusion_bench_nufilt.merge.plan import Plan, select
from fusion_bench_nufilt.merge.relation import check_relation
from fusion_bench_nufilt.merge.settings import Settings
from fusion_bench_nufilt.methods import Report, find_method
from fusion_bench_nufilt.models import Heads, TargetConfig
from fusion_bench_nufilt.models.architecture import Architecture
from fusion_bench_nufilt.models.model import ModelWeights
from fusion_bench_nufilt.models.module import MemorySource, module_source
from fusion_bench_nufilt.models.ties import carry_over, earlier_params, tie_weights, untie_model
from fusion_bench_nufilt.models.views import MatrixView
from fusion_bench_nufilt.nufilt import FusionConfig
from fusion_bench_nufilt.pages.write import read_table
from fusion_bench_nufilt.utils.files import write_text
from fusion_bench_nufilt.utils.manifest import load_state, read_heads
from fusion_bench_nufilt.utils.options import options_of, split_options, takes_options
from fusion_bench_nufilt.utils.schemas import Head, Manifest

from .algorithm import ContinualMergingAlgorithm
from .models import MERGED, PRETRAINED, refuse_missing_keys
from .protocol import DeviceConfig, ProtocolConfig

log = logging.getLogger(__name__)
_warn_once = cache(log.warning)  # once for all runs of a comparison


class LayerwiseMergingAlgorithm(ContinualMergingAlgorithm):
    """Merges the chosen layers by a method, everything else as ``other_params`` says, and writes
    ``layers.csv``.

    Args:
        layer_method: the name of a method in :data:`fusion_bench_nufilt.methods.METHODS`.
        **kwargs: the options of that method and of ``TargetConfig``, ``DeviceConfig`` and
            ``ProtocolConfig``.

    Raises:
        ValueError: a value is out of its range, or there is no such method or option; the message
            names it.
    """

    def __init__(self, layer_method: str, **kwargs: Any) -> None:
        self._kind = find_method(layer_method)
        plain = {
            key: list(value) if isinstance(value, ListConfig) else value
            for key, value in kwargs.items()
        }
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
        self.options, self.targets, self.device_config = (
            options_of(kind, self) for kind in self._own
        )
        self.task_heads: dict[str, Head] = {}
        self.head_tensors: dict[str, dict[str, Tensor]] = {}
        # What is kept to go on from, as in the file beside a merged model.
        self._states: dict[str, Tensor] = {}
        self._wide_layers = False  # whether that has layers in more digits than the model
        self._mean_counts: dict[
            str, int
        ] = {}  # of tensors outside the merged layers, where not one for each step
        self._reports: list[dict[str, Any]] = []  # the rows of layers.csv
        self._lacking: dict[
            str, set[str]
        ] = {}  # weights that the models lack, or have in another shape
        self._architecture = Architecture(pretrained)
        self._earlier: dict[str, str] = {}  # params of tied weights in a merge that is gone on from
        self._base = self._model(PRETRAINED, pretrained, ())
        stored = self._model(PRETRAINED, pretrained, self.missing_in_pretrained).params
        config = self._base.source.config
        self._heads = Heads(
            self.targets.heads,
            stored,
            config,
            self._architecture.backbone,
            self._architecture.embeddings(stored),
        )
        self._heads.keep(self.before.get("heads", {}).values())
        self._heads.add(
            PRETRAINED, self._base.params, config, ()
        )  # a head that its checkpoint lacks counts, too
        self._select()
        log.info("%s", self.method)

    @property
    def layers(self) -> dict[str, MatrixView]:
        """The merged layers of the last run, by name."""
        return {layer.name: layer.view for layer in self._selection.layers}

    def _select(self) -> None:
        """Select the layers, without those of the heads that are known by now."""
        self._selection = select(self._base, self._architecture, self.targets, self._heads)
        self.method = self._kind(
            self.options, list(self.layers), self.seed, self._architecture.last_blocks
        )
        log.info("%s", self._selection.coverage)
        shapes = [view.shape for view in self.layers.values()]
        doubts = self._selection.coverage.warning, self.method.warning(shapes, self.door)
        for warning in filter(None, doubts):
            _warn_once("%s", warning)

    def _model(self, name: str, model: nn.Module, lacking: Collection[str]) -> ModelWeights:
        opened = ModelWeights(module_source(name, model, lacking), self._architecture)
        opened.tie(self._architecture)
        return opened

    def _untie(
        self, pretrained: nn.Module, model: nn.Module, name: str, missing_keys: Sequence[str]
    ) -> None:
        """Untie what a model has as two weights, and the pretrained one as one."""
        opened = ModelWeights(module_source(name, model, missing_keys), self._architecture)
        before = self._architecture.weights
        if name == MERGED:
            self._earlier = earlier_params(self._architecture, opened)
            tie_weights(self._architecture, [opened], [], self.targets)
        else:
            step = self.first_step + self.names.index(name)
            tie_weights(self._architecture, [], [opened], self.targets, step)
        if self._architecture.weights != before:
            self._base = self._model(PRETRAINED, pretrained, ())
            self._select()
            earlier = {name: self._architecture.first(names) for names in before for name in names}
            carry_over(self._architecture, self._mean_counts, earlier)
            carry_over(self._architecture, self._states, earlier, mean_key)

    @property
    def solving_share(self) -> float | None:
        """The share of the merging time that the solver took; None for a method without one."""
        solving = sum(row.get("solving_seconds", 0.0) for row in self._reports)
        return solving / sum(row["seconds"] for row in self._reports) if solving else None

    def prepare(self, merged: nn.Module) -> None:
        untie_model(self._architecture, merged)

    def describe(self) -> dict[str, Any]:
        step = self.first_step + len(self.merge_seconds) - 1
        counts = {key: count for key, count in self._mean_counts.items() if count != step}
        return {
            "coverage": self._selection.coverage.as_dict(),
            "mean_counts": counts,
            "heads": self.task_heads,
        }

    def state(self) -> dict[str, Tensor]:
        return self._states

    def go_on_from(self, folder: Path | None, manifest: Manifest) -> None:
        self._mean_counts = dict(manifest.get("mean_counts", {}))
        self.task_heads = dict(manifest.get("heads", {}))
        self.files = {} if folder is None else read_heads(folder, manifest)
        self.head_tensors = {
            task: load(self.files[head["file"]]) for task, head in self.task_heads.items()
        }
        self._states = {} if folder is None else load_state(folder)
        carry_over(self._architecture, self._mean_counts, self._earlier)
        carry_over(self._architecture, self._states, self._earlier, mean_key)
        step = manifest.get("step", self.first_step - 1) + 1
        plan = dataclasses.replace(self._plan([], step), before=manifest)
        for warning in check_state(plan, MERGED if folder is None else str(folder)):
            log.warning("%s", warning)
        self._states = {key: self._states[stored] for key, stored in stored_keys(plan).items()}
        self._wide_layers = self.method.state_is_weight and any(
            layer.keys[0] in self._states for layer in plan.layers if has_state(plan, layer)
        )

    def check_model(
        self, pretrained: nn.Module, model: nn.Module, name: str, missing_keys: Sequence[str] = ()
    ) -> None:
        if name != PRETRAINED:
            self._untie(pretrained, model, name, missing_keys)
        if name in (PRETRAINED, MERGED):
            merged = {view.key for view in self.layers.values()}
            refuse_missing_keys(
                name, [key for key in missing_keys if key in merged], can_exclude=True
            )
            if name == MERGED:
                check_made_from(self._base, self._model(name, model, ()), ())
            return
        task, before = self._model(name, model, missing_keys), self._heads.of(self._base.params)
        find_head(self._heads, task)
        if self._heads.of(self._base.params) != before:
            self._refuse_late_head(name)
            self._select()
        take_head(self._heads, task)
        if lost := self._heads.of(map(self._architecture.param, missing_keys)):
            why = f"its checkpoint has no head ('{lost[0]}' was drawn at random)"
            log.warning("model '%s': %s: none is kept", name, why)
        plan = self._plan([task], self.first_step + self.names.index(name))
        for warning in chain(
            check_task(plan, task, self._architecture, plan.averaged), check_relation(plan)
        ):
            log.warning("%s", warning)
        ignored = (
            key for key in task.source.tensors if self._architecture.param(key) in task.ignored
        )
        self._lacking[name] = {*missing_keys, *ignored}

    def _refuse_late_head(self, name: str) -> None:
        """Refuse a head that is found after a step has merged it as a layer."""
        if not self._checked_first and self.first_step + len(self.merge_seconds) > 1:
            heads = ", ".join(sorted(self._heads.modules))
            said = (
                f"model '{name}' has a head of its own ({heads}), which the models before it had "
                "not"
            )
            raise ValueError(f"{said}: set heads='{heads}', or leave check_models on")

    def _plan(
        self, tasks: list[ModelWeights], step: int, merged: ModelWeights | None = None
    ) -> Plan:
        """Return the plan of a step."""
        state = MemorySource("the state", self._states)
        devices = self.device_config.choose(self.fabric.device)
        settings = Settings(
            seed=self.seed,
            step=step,
            device=",".join(map(str, devices)),
            state=True if self._wide_layers else None,
        )
        before = Manifest(step=step - 1, mean_counts=self._mean_counts, heads=self.task_heads)
        return Plan(
            **vars(self._selection),
            tasks=tasks,
            method=self.method,
            settings=settings,
            before=before,
            merged=merged,
            state=ModelWeights(state, self._architecture) if self._states else None,
            heads=describe_heads(self._heads, self._base, tasks, before),
        )

    def merge_step(
        self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module
    ) -> nn.Module:
        model = self._model(name, task, self._lacking[name])
        take_head(self._heads, model)
        self.prepare(merged)
        so_far = self._model(MERGED, merged, ())
        result = so_far.source
        assert isinstance(result, MemorySource)
        plan = self._plan([model], step, so_far)
        self._keep_heads(plan)
        reports: dict[str, Report] = {}

        def take(each: MergedLayer, weigh: Callable[[], Tensor]) -> None:
            layer = each.layer
            if self.method.state_is_weight or self.is_used(step):
                result.write(so_far.keys[layer.param], weigh())
            if plan.keeps_state and has_state(plan, layer):
                home = layer.view.read(pretrained).device
                for key, value in state_to_keep(plan, layer, each.state).items():
                    self._states[key] = value.to(home)
            else:  # what an earlier merge kept in float32 is in the model now
                for key, _, _ in state_tensors(plan, layer).values():
                    self._states.pop(key, None)
            reports[layer.name] = each.record["reports"][0]

        with tqdm(
            total=len(plan.layers), desc=f"Merging {name}", unit="layer", leave=False, disable=None
        ) as bar:
            for count in merge_layers(plan, plan.layers, take):
                bar.update(count)
        counts, means = average_others(plan, result.write)
        self._mean_counts |= counts
        for param in counts:
            self._states.pop(mean_key(param), None)
        self._states |= means
        self._report(name, {layer.name: reports[layer.name] for layer in plan.layers})
        return merged

    def _keep_heads(self, plan: Plan) -> None:
        """Keep the head of the plan's task, if it has one."""
        files = new_heads(plan)
        self.files = {**self.files, **files}
        new = {name: head for name, head in plan.heads.items() if name not in self.task_heads}
        self.head_tensors |= {name: load(files[head["file"]]) for name, head in new.items()}
        self.task_heads = plan.heads

    def restore(self, step: int) -> None:
        if self.folder is not None and (file := self.folder.path / "layers.csv").is_file():
            try:
                rows = read_table(file, "task layer step")
                self._reports = rows[rows["step"] <= step].to_dict("records")
            except ValueError as error:
                log.warning("%s: it begins anew with step %d", error, step + 1)

    def _report(self, name: str, reports: Mapping[str, Report]) -> None:
        self._reports += [
            {"step": row["step"], "task": name, "layer": layer, **row}
            for layer, row in reports.items()
        ]
        if self.folder is None:
            return
        write_text(self.folder.path / "layers.csv", pd.DataFrame(self._reports).to_csv(index=False))
        if self.fabric.loggers:
            step = next(row["step"] for row in reports.values())
            means = {
                key: sum(row[key] for row in reports.values()) / len(reports)
                for key in self.method.logged
            }
            self.log_dict({f"layers/{key}": mean for key, mean in means.items()}, step=step)


@auto_register_config
@takes_options(FusionConfig, TargetConfig, DeviceConfig, ProtocolConfig)
class NufiltContinualMergingAlgorithm(LayerwiseMergingAlgorithm):
    """Null-space filtering for data-free continual model merging (Qiu et al., ICLR 2026).

    Args:
        **kwargs: the options of ``FusionConfig``, ``TargetConfig``, ``DeviceConfig`` and
            ``ProtocolConfig``.

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
            log.info(
                "this is NUFILT of fusion_bench_nufilt; FusionBench's own is method=nufilt/nufilt"
            )
        super().start(pretrained, names)

    def merge_step(
        self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module
    ) -> nn.Module:
        merged = super().merge_step(step, name, pretrained, merged, task)
        parameters, share = self._selection.coverage.others
        is_whole = self.options.first_task == "paper" and self.targets.other_params == "pretrained"
        if step == 1 and is_whole and parameters > 0:
            log.info(
                "step 1: '%s' is taken whole in the merged layers alone; %d other parameters "
                "(%.1f%% of all elements) stay pretrained, so it may score less than by itself "
                "(other_params=first takes them from it, too)",
                name,
                parameters,
                100 * share,
            )
        return merged
