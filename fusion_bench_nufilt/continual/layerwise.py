"""The FusionBench algorithm of every layer-wise method."""

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from fusion_bench import auto_register_config
from omegaconf import ListConfig
from safetensors.torch import load
from torch import Tensor, nn
from tqdm.auto import tqdm

from fusion_bench_nufilt.merge.checks import check_same_base, other_options
from fusion_bench_nufilt.merge.engine import Pieces, do_jobs
from fusion_bench_nufilt.merge.kept_state import KeptState
from fusion_bench_nufilt.merge.layer_jobs import (
    affords_state,
    layer_jobs,
    machine_of,
    task_strengths,
)
from fusion_bench_nufilt.merge.other_params import other_tensors
from fusion_bench_nufilt.merge.output import Record
from fusion_bench_nufilt.merge.plan import Plan, method_of
from fusion_bench_nufilt.methods.base import LayerMethod
from fusion_bench_nufilt.methods.options import DeviceConfig, ProtocolConfig, Settings, TargetConfig
from fusion_bench_nufilt.methods.registry import find_method
from fusion_bench_nufilt.models.architecture import Architecture
from fusion_bench_nufilt.models.fit import check_base, check_merged, check_task
from fusion_bench_nufilt.models.heads import Heads
from fusion_bench_nufilt.models.layers import MatrixView
from fusion_bench_nufilt.models.model import (
    ModelWeights,
    carry_over,
    tie_weights,
    untie_model,
    weights_in,
)
from fusion_bench_nufilt.models.selection import (
    Selection,
    describe_heads,
    heads_of_base,
    take_heads,
)
from fusion_bench_nufilt.models.source import MemorySource, module_source
from fusion_bench_nufilt.nufilt.options import FusionConfig
from fusion_bench_nufilt.pages.metrics import has_quantity
from fusion_bench_nufilt.pages.write import read_layers
from fusion_bench_nufilt.utils.files import Head, Manifest, write_text
from fusion_bench_nufilt.utils.manifest import load_state, read_heads, state_key
from fusion_bench_nufilt.utils.options import (
    options_of,
    split_options,
    takes_options,
)
from fusion_bench_nufilt.utils.tensors import describe

from .algorithm import ContinualMergingAlgorithm
from .models import MERGED, PRETRAINED, refuse_missing_keys
from .stopwatch import SAVING

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

    layer_method: str  # the name of the method
    method_class: type[LayerMethod]

    # These are set when a run starts, from the attributes that have the options' names.
    options: Any  # of the method, an instance of its `Options`
    targets: TargetConfig
    device_config: DeviceConfig

    # These describe the last run.
    method: LayerMethod
    task_heads: dict[str, Head]  # the heads that are kept, by task
    head_tensors: dict[str, dict[str, Tensor]]
    # What is merged, as far as the models so far tell:
    _architecture: Architecture
    _pretrained: ModelWeights
    _heads: Heads
    _selection: Selection
    _states: dict[str, Tensor]  # what is kept to go on from, as in the file beside a merged model
    _holds_float32: bool  # whether that has all in float32 that the model rounds
    _mean_counts: dict[str, int]  # models in the mean of a tensor, where not one for each step
    _rounding: dict[str, float]  # what rounding has added to the update of each layer so far
    _ignored_keys: dict[str, set[str]]  # by model: weights that its checkpoint lacks
    _earlier_architecture: Architecture | None  # of a merged model that is gone on from
    _reports: list[dict[str, Any]]  # the rows of layers.csv

    def __init__(self, layer_method: str, **kwargs: Any) -> None:
        self.layer_method = layer_method
        self.method_class = find_method(layer_method)
        values = dict(self.method_class.defaults)
        for key, value in kwargs.items():
            # Hydra's lists are of this type, which is no list for the options' checks.
            if isinstance(value, ListConfig):
                value = list(value)
            values[key] = value
        # This checks the values, too.
        option_classes = [self.method_class.Options, TargetConfig, DeviceConfig]
        instances, protocol = split_options(option_classes, values)
        # FusionBench saves as the algorithm's configuration the attributes that the mapping names.
        # auto_register_config can't know these, since they depend on the method.
        self._config_mapping = type(self)._config_mapping.copy()
        self._config_mapping["layer_method"] = "layer_method"
        for instance in instances:
            for key, value in vars(instance).items():
                self._config_mapping[key] = key
                setattr(self, key, value)
        self.option_kinds = (*option_classes, ProtocolConfig)
        super().__init__(**protocol)

    @property
    def name(self) -> str:
        return self.method_class.label

    def start(self, pretrained: nn.Module, names: list[str]) -> None:
        # A caller may have changed an attribute since the constructor.
        self.options = options_of(self.method_class.Options, self)
        self.targets = options_of(TargetConfig, self)
        self.device_config = options_of(DeviceConfig, self)
        self.task_heads = {}
        self.head_tensors = {}
        self._states = {}
        self._holds_float32 = False
        self._mean_counts = {}
        self._rounding = {}
        self._reports = []
        self._ignored_keys = {}
        self._earlier_architecture = None
        base = module_source(PRETRAINED, pretrained)
        self._architecture = Architecture(pretrained)
        self._pretrained = ModelWeights(base, self._architecture)
        self._tie()
        stored = self._model(PRETRAINED, pretrained, self.missing_in_pretrained).shapes
        # Before layers are chosen: else the head would be merged, and the state not fit.
        self._heads = heads_of_base(
            self._architecture, self._pretrained, self.targets.heads, self.merged_manifest, stored
        )
        # A head that its checkpoint lacks counts, too.
        self._heads.add(PRETRAINED, self._pretrained.shapes, base.config, ())
        self._select()
        log.info("%s", self.method)

    @property
    def layers(self) -> dict[str, MatrixView]:
        """The merged layers of the last run, by name."""
        return {layer.name: layer.view for layer in self._selection.layers}

    def _select(self) -> None:
        """Select the layers, without those of the heads that are known by now."""
        self._selection = Selection.of(
            self._architecture, self._pretrained, self.targets, self._heads
        )
        check_base(self._selection)
        self.method = method_of(self.method_class, self.options, self.seed, self._selection)
        coverage = self._selection.coverage
        log.info("%s", coverage)
        shapes = []
        if self._last_step > 1:  # the first model of all meets no other
            shapes = [view.shape for view in self.layers.values()]
        all_merged = not coverage.left_out
        for warning in (
            coverage.warning,
            self.method.warning(shapes, all_merged=all_merged),
        ):
            if warning:
                _warn_once("%s", warning)

    def _model(self, name: str, model: nn.Module, ignored: Collection[str]) -> ModelWeights:
        """Return the weights of a module, but those of the ignored keys."""
        architecture = self._architecture
        weights = ModelWeights(module_source(name, model, ignored), architecture)
        weights.tie(architecture)
        return weights

    def _tie(
        self,
        lasting: Sequence[ModelWeights] = (),
        tasks: Sequence[ModelWeights] = (),
        first_step: int = 1,
    ) -> None:
        """Decide which names share a weight in the pretrained model and in these."""
        # Anew, since what was tied has a tensor for each weight, and no longer for each name.
        self._pretrained = ModelWeights(self._pretrained.source, self._architecture)
        self._architecture = tie_weights(
            self._architecture, [self._pretrained, *lasting], tasks, self.targets, first_step
        )

    def _untie(self, model: nn.Module, name: str, missing_keys: Sequence[str]) -> None:
        """Untie what a model has as two weights, and the pretrained one as one."""
        before = self._architecture
        weights = ModelWeights(module_source(name, model, missing_keys), before)
        if name == MERGED:
            self._earlier_architecture = before.apart(weights_in(before, weights))
            self._tie(lasting=[weights])
        else:
            step = self.first_step + self.names.index(name)
            self._tie(tasks=[weights], first_step=step)
        if self._architecture.names_by_weight == before.names_by_weight:
            return
        self._select()
        self._carry_over(before)

    def _carry_over(self, earlier: Architecture) -> None:
        """Have what was kept of a weight for each of those that it has become."""
        carry_over(self._architecture, self._mean_counts, earlier)
        carry_over(self._architecture, self._states, earlier, state_key)

    @property
    def solving_share(self) -> float | None:
        """The share of the merging time that the solver took; None for a method without one."""
        solving_seconds = sum(row.get("solving_seconds", 0.0) for row in self._reports)
        if not solving_seconds:
            return None
        return solving_seconds / sum(row["seconds"] for row in self._reports)

    def prepare(self, merged: nn.Module) -> nn.Module:
        untie_model(self._architecture, merged)
        return merged

    def describe(self) -> dict[str, Any]:
        step = self.first_step + len(self.merge_seconds) - 1
        # A tensor that every model has is the mean of `step` models, and needs no entry.
        counts = {key: count for key, count in self._mean_counts.items() if count != step}
        return {
            "coverage": self._selection.coverage.as_dict(),
            "mean_counts": counts,
            "rounding": self._rounding,
            "heads": self.task_heads,
        }

    def state(self) -> dict[str, Tensor]:
        return self._states

    def go_on_from(self, folder: Path | None, manifest: Manifest) -> None:
        self._mean_counts = dict(manifest.get("mean_counts", {}))
        self._rounding = dict(manifest.get("rounding", {}))
        self.task_heads = dict(manifest.get("heads", {}))
        self.files = {}
        self._states = {}
        source = MERGED
        if folder is not None:
            self.files = read_heads(folder, manifest)
            self._states = load_state(folder)
            source = str(folder)
        self.head_tensors = {}
        for task, head in self.task_heads.items():
            self.head_tensors[task] = load(self.files[head["file"]])
        if self._earlier_architecture is not None:
            self._carry_over(self._earlier_architecture)
        step = manifest.get("step", self.first_step - 1) + 1
        plan = dataclasses.replace(self._plan([], step), merged_manifest=manifest)
        kept = KeptState(plan)
        for warning in kept.check(source):
            log.warning("%s", warning)
        keys = kept.keys()
        self._states = {key: value for key, value in self._states.items() if key in keys}
        if self.folder is not None and folder == self.folder.checkpoint(step - 1):
            self._read_reports(step - 1)
        # Of a method that keeps nothing but the weight, a state is the weight in float32.
        if not self.method.keeps_sums:
            layers = [layer for layer in plan.layers if kept.is_needed(layer)]
            self._holds_float32 = any(kept.has_state(layer) for layer in layers)

    def check_model(
        self, pretrained: nn.Module, model: nn.Module, name: str, missing_keys: Sequence[str] = ()
    ) -> None:
        if name != PRETRAINED:
            self._untie(model, name, missing_keys)
        if name in (PRETRAINED, MERGED):
            merged_keys = {view.key for view in self.layers.values()}
            missing_layers = [key for key in missing_keys if key in merged_keys]
            refuse_missing_keys(name, missing_layers, can_exclude=True)
            if name == MERGED:
                self._check_merged(self._model(name, model, ()))
            return
        task = self._model(name, model, missing_keys)
        heads_before = self._heads.of(self._pretrained.entries)
        take_heads(self._heads, [task])
        if self._heads.of(self._pretrained.entries) != heads_before:
            self._refuse_late_head(name)
            self._select()
        missing_heads = self._heads.of(map(self._architecture.param, missing_keys))
        if missing_heads:
            log.warning(
                "model '%s': its checkpoint has no head ('%s' was drawn at random): none is kept",
                name,
                missing_heads[0],
            )
        plan = self._plan([task], self.first_step + self.names.index(name))
        for warning in check_task(plan, task, plan.averaged):
            log.warning("%s", warning)
        for warning in check_same_base(plan):
            log.warning("%s", warning)
        self._ignored_keys[name] = set(missing_keys)

    def _check_merged(self, merged: ModelWeights) -> None:
        check_merged(self._selection, merged)
        plan = self._plan([], self.first_step, merged)
        plan_to_go_on = dataclasses.replace(plan, merged_manifest=self.merged_manifest)
        # Of the options of a run, a plan has the seed alone.
        warnings = other_options(plan_to_go_on, ProtocolConfig)
        if self.verify and self.is_of_this_base is None:
            warnings += check_same_base(plan)
        for warning in warnings:
            log.warning("%s", warning)

    def _refuse_late_head(self, name: str) -> None:
        """Refuse a head that is found after a step has merged it as a layer."""
        # Choosing the layers anew would drop what the steps made so far have kept of them.
        if not self._checked_first and self.first_step + len(self.merge_seconds) > 1:
            heads = ", ".join(sorted(self._heads.modules))
            raise ValueError(
                f"model '{name}' has a head of its own ({heads}), which the models before it had "
                f"not: set heads='{heads}', or leave check_models on"
            )

    def _plan(
        self, tasks: list[ModelWeights], step: int, merged: ModelWeights | None = None
    ) -> Plan:
        """Return the plan of a step."""
        state = None
        if self._states:
            source = MemorySource("the state", self._states)
            state = ModelWeights(source, self._architecture)
        devices = self.device_config.choose(self.fabric.device)
        settings = Settings(
            seed=self.seed,
            step=step,
            device=",".join(map(str, devices)),
            state=True if self._holds_float32 else None,
            verify=self.verify,
        )
        merged_manifest = Manifest(
            step=step - 1,
            mean_counts=self._mean_counts,
            rounding=dict(self._rounding),
            heads=self.task_heads,
        )
        return Plan(
            **vars(self._selection),
            tasks=tasks,
            method=self.method,
            settings=settings,
            merged_manifest=merged_manifest,
            merged=merged,
            state=state,
            heads=describe_heads(self._heads, self._pretrained, tasks, merged_manifest),
        )

    def merge_step(
        self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module
    ) -> nn.Module:
        model = self._model(name, task, self._ignored_keys[name])
        model.take_head(self._heads.of(model.float_params))
        self.prepare(merged)
        merged_weights = self._model(MERGED, merged, ())
        merged_source = merged_weights.source
        assert isinstance(merged_source, MemorySource)
        plan = self._plan([model], step, merged_weights)
        if not self.merge_seconds and not plan.keeps_state:
            self._holds_float32 = affords_state(plan, next(merged.parameters()).device)
            plan = self._plan([model], step, merged_weights)
        self._keep_heads(plan)
        kept = KeptState(plan)
        names = {layer.param: layer.name for layer in plan.layers}
        reports: dict[str, dict[str, Any]] = {}

        keys = {layer.param: layer.keys[0] for layer in plan.layers}
        joined = [param for param in plan.other_keys if plan.joining(param)]
        keys |= {param: plan.other_keys[param][0] for param in joined}
        places = {}
        for param, key in keys.items():
            # The weight of a step that nobody reads is not computed, unless it is the state.
            if param in joined or not self.method.keeps_sums or self.is_used(step):
                written_key = merged_weights.entries[param].key
                # What a tensor in memory has for a file is its key.
                info = merged_source.tensors[written_key]
                places[key] = dataclasses.replace(info, file=written_key)
        likes = kept.needed()
        for key, like in likes.items():
            places[key] = dataclasses.replace(describe(like), file=key)

        def add(record: Record, pieces: Pieces) -> None:
            blocks = defaultdict(list)
            for place, piece in pieces:
                blocks[place].append(piece)
            device = self._pretrained.source.device(keys[record["param"]])
            for place, parts in blocks.items():
                value = parts[0] if len(parts) == 1 else torch.cat(parts)
                value = value.reshape(place.shape)
                if place.file in likes:
                    # The state stays with the model, whichever GPU computed the layer.
                    self._states[place.file] = value.to(device)
                else:
                    merged_source.write(place.file, value)
            if record["reports"]:
                name = names[record["param"]]
                self._rounding[name] = record["rounding"]
                (reports[name],) = record["reports"]

        jobs = layer_jobs(kept, plan.layers, task_strengths(kept), places)
        tensors = other_tensors(plan, joined, places)
        with (
            closing(do_jobs(jobs, machine_of(plan), add, tensors)) as merged_layers,
            tqdm(
                total=len(plan.layers),
                desc=f"Merging {name}",
                unit="layer",
                leave=False,
                disable=None,
            ) as bar,
        ):
            for count in merged_layers:
                bar.update(count)
        # What an earlier merge kept in float32 is in the model now.
        self._states = {key: value for key, value in self._states.items() if key in likes}
        self._mean_counts |= plan.mean_counts
        # Whichever device is free takes the next layers, so that they end in any order.
        self._report(name, {layer.name: reports[layer.name] for layer in plan.layers})
        return merged

    def _keep_heads(self, plan: Plan) -> None:
        """Keep the head of the plan's task, if it has one."""
        files = plan.new_heads()
        self.files = {**self.files, **files}
        for name, head in plan.heads.items():
            if name not in self.task_heads:
                self.head_tensors[name] = load(files[head["file"]])
        self.task_heads = plan.heads

    def _read_reports(self, step: int) -> None:
        """Take over the rows of ``layers.csv`` up to a step of this run."""
        assert self.folder is not None
        self._reports = []
        file = self.folder.path / "layers.csv"
        if not file.is_file():
            log.warning("'%s' is not there: it begins anew with step %d", file, step + 1)
            return
        try:
            rows = read_layers(file)
        except ValueError as error:
            log.warning("%s: it begins anew with step %d", error, step + 1)
            return
        # A step that was reported, but is not whole on disk, is made and reported again.
        self._reports = rows[rows["step"] <= step].to_dict("records")
        for finished_step in range(self.first_step, step + 1):
            self._log_means([row for row in self._reports if row["step"] == finished_step])

    def _report(self, name: str, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Add what a step did to the layers to ``layers.csv``, and its means to the loggers."""
        rows = []
        for layer, row in reports.items():
            rows.append({"step": row["step"], "task": name, "layer": layer, **row})
        self._reports += rows
        if self.folder is None:
            return
        with self.stopwatch.part(SAVING):
            table = pd.DataFrame(self._reports)
            write_text(self.folder.path / "layers.csv", table.to_csv(index=False))
            self._log_means(rows)

    def _log_means(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Give the loggers the means over the layers of a step, given its rows of
        ``layers.csv``.
        """
        if not (self.fabric.loggers and rows):
            return
        means = {}
        for key in self.method.logged:
            values = [row[key] for row in rows if has_quantity(key, row)]
            if values:
                means[f"layers/{key}"] = sum(values) / len(values)
        self.log_dict(means, step=int(rows[0]["step"]))


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
        # In an environment with both, `method=nufilt` is this one, and the name does not tell.
        if find_spec("fusion_bench.method.nufilt") is not None:
            log.info(
                "this is NUFILT of fusion_bench_nufilt; FusionBench's own is method=nufilt/nufilt"
            )
        super().start(pretrained, names)

    def merge_step(
        self, step: int, name: str, pretrained: nn.Module, merged: nn.Module, task: nn.Module
    ) -> nn.Module:
        merged = super().merge_step(step, name, pretrained, merged, task)
        parameters, share = self._selection.coverage.other_params
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
