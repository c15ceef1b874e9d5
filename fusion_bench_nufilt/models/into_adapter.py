"""What adapters change of a base, where they are merged into an adapter; what no adapter holds is
refused.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from fusion_bench_nufilt.methods.options import Settings, TargetConfig
from fusion_bench_nufilt.utils.files import Manifest
from fusion_bench_nufilt.utils.manifest import read_manifest

from .absent_base import AbsentBase
from .adapter_reader import INTO_A_MODEL
from .adapters import holds_in_full, refuse_adapter_of_others
from .checkpoint import Checkpoint, is_adapter
from .experts import ExpertRows, FactorsOfExpert
from .lora import Dora
from .model import ModelWeights
from .opened import Checkpoints, NamedModels
from .selection import Selection, add_head_of, heads_of_base
from .source import format_names

AnyAdapter = TypeVar("AnyAdapter", Checkpoint, ModelWeights)


def open_adapters(
    base: str | None,
    tasks: Sequence[str],
    merged: str | None,
    targets: TargetConfig,
    settings: Settings,
) -> Checkpoints:
    """Open the adapters, and of their base no more than is needed; the arguments are those of
    :func:`.door.open_models`.
    """
    opened = [_open_adapter(name) for name in tasks]
    merged_checkpoint = None if merged is None else _open_adapter(merged)
    all_adapters = opened if merged_checkpoint is None else [merged_checkpoint, *opened]
    checkpoints = Checkpoints(AbsentBase(all_adapters, base), opened, merged_checkpoint)
    merged_manifest = Manifest()
    if merged_checkpoint is not None:
        merged_manifest = read_manifest(merged_checkpoint.folder)
    first_step = settings.first_step(merged_manifest)
    sources_outside = adapters_outside(merged_checkpoint, opened, targets, first_step)
    if base is not None and any(map(holds_in_full, sources_outside)):
        # Of what an adapter holds in full, a mean needs the base's.
        return checkpoints._replace(base=Checkpoint.open(base))
    return checkpoints


def _open_adapter(name: str) -> Checkpoint:
    checkpoint = Checkpoint.open(name)
    if not is_adapter(checkpoint.folder):
        refuse_adapter_of_others(checkpoint)
        raise ValueError(
            f"'{name}' is a whole model, and --adapter merges adapters alone: leave it out, and "
            "name the base with --base"
        )
    return checkpoint


def refuse_what_no_adapter_holds(models: NamedModels, targets: TargetConfig) -> None:
    """Refuse adapters that change what an adapter of several tasks can't change."""
    heads = heads_of_base(
        models.architecture, models.pretrained, targets.heads, models.merged_manifest
    )
    for task in models.tasks:
        add_head_of(heads, task)
    for adapter in models.adapters:
        of_heads = heads.of(param for param, entry in adapter.entries.items() if entry.is_stored)
        experts = adapter.params_of(ExpertRows, FactorsOfExpert)
        of_dora = adapter.params_of(Dora)
        reason = ""
        if of_dora:
            names = format_names(of_dora)
            reason = f"is a DoRA, whose lengths of {names} are of the base's rows, too"
        elif experts:
            reason = (
                f"is of fused experts ({format_names(experts)}), which it can't hold one by one"
            )
        elif of_heads:
            reason = f"has a head of its own ({format_names(of_heads)}), of which it can hold one"
        if reason:
            raise ValueError(f"adapter '{adapter.source.name}' {reason}: {INTO_A_MODEL}")


def select_for_adapter(selection: Selection, models: NamedModels, settings: Settings) -> Selection:
    """Return what adapters change of a selection, some of them outside the layers as well; refuse
    what they do not hold as factors, and what is without a base.
    """
    first_step = settings.first_step(models.merged_manifest)
    sources_outside = adapters_outside(models.merged, models.tasks, selection.targets, first_step)
    for adapter in sources_outside:
        _refuse_without_base(selection, adapter, is_merged=adapter is models.merged)
    changed: set[str] = set()
    for adapter in models.adapters:
        changed.update(adapter.changed_params)
    layers = [layer for layer in selection.layers if layer.param in changed]
    if not layers:
        layers = selection.layers  # a check names them
    for adapter in models.adapters:
        full = [layer.param for layer in layers if adapter.info(layer.param)]
        if full:
            raise ValueError(
                f"adapter '{adapter.source.name}' holds {format_names(full)} in full, which is "
                f"merged as a layer and has no factors: {INTO_A_MODEL}"
            )
    changed_outside: set[str] = set()
    for adapter in sources_outside:
        changed_outside.update(adapter.changed_params)
    other_keys = {}
    for param, keys in selection.other_keys.items():
        if param in changed_outside:
            other_keys[param] = keys
    targets = selection.targets
    if not other_keys:  # no adapter changes what else the model has
        targets = dataclasses.replace(targets, other_params="pretrained")
    coverage = selection.architecture.coverage(layers, targets)
    return dataclasses.replace(selection, layers=layers, other_keys=other_keys, coverage=coverage)


def adapters_outside(
    merged: AnyAdapter | None,
    tasks: Sequence[AnyAdapter],
    targets: TargetConfig,
    first_step: int,
) -> list[AnyAdapter]:
    """Return the adapters from which the result has tensors outside the merged layers."""
    sources = [] if merged is None else [merged]
    for step, task in enumerate(tasks, first_step):
        if targets.changes_other_params(step):
            sources.append(task)
    return sources


def _refuse_without_base(selection: Selection, adapter: ModelWeights, *, is_merged: bool) -> None:
    keys = dict.fromkeys(entry.key for entry in adapter.entries.values() if entry.is_stored)
    if not keys or not selection.base.is_absent:
        return
    full = [adapter.name_of(key) for key in keys]
    other_way = ""
    if not is_merged:
        other_way = ", or leave them as they are in it with --other-params pretrained"
    raise ValueError(
        f"adapter '{adapter.source.name}' holds {format_names(full)} in full, of which a mean "
        f"needs the base's: name the folder of the base with --base{other_way}"
    )
