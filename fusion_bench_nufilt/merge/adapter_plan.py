"""Plan a merge of adapters into an adapter, for which no weight of their base is read.

Layers are merged in a basis of the adapters' factors, where the base is zero, and the result has
the factors of what comes out. What an adapter holds besides factors of single layers has no place
in such a merge, and is refused.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fusion_bench_nufilt.methods import LayerMethod
from fusion_bench_nufilt.methods.options import Settings, TargetConfig
from fusion_bench_nufilt.models.absent_base import AbsentBase
from fusion_bench_nufilt.models.adapters import EMBEDDING_A, PREFIX, LoraAdapter, adapter_config
from fusion_bench_nufilt.models.architecture import Architecture
from fusion_bench_nufilt.models.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Checkpoint,
    is_adapter,
)
from fusion_bench_nufilt.models.layers import coverage
from fusion_bench_nufilt.models.model import ModelWeights, complete_base, tie_weights
from fusion_bench_nufilt.models.source import format_names
from fusion_bench_nufilt.models.vocabulary import TOKENIZER_FILES
from fusion_bench_nufilt.utils.files import Manifest
from fusion_bench_nufilt.utils.manifest import STATE_FILE, read_manifest
from fusion_bench_nufilt.utils.tensors import TensorInfo

from .checks import check_shapes
from .other_params import find_heads
from .plan import DTYPES, Files, Plan, Selection, select
from .planned import shape_in_basis

# The ranks that vLLM has for its option max_lora_rank end here.
_HIGHEST_RANK_OF_VLLM = 512


def plan_adapter(
    base: str | None,
    tasks: Sequence[str],
    merged: str | None,
    options: Any,
    targets: TargetConfig,
    settings: Settings,
    method_class: type[LayerMethod],
) -> tuple[Plan, Architecture]:
    """Plan a merge up to the checks that all plans pass; the arguments are those of
    :func:`.planning.plan_merge`.
    """
    if "o" not in method_class.sides_in_basis:
        raise ValueError(
            f"method {method_class.name} does not say that it merges in a basis of the tasks' "
            "directions (sides_in_basis), without which there is no merge into an adapter: leave "
            "--adapter out, and name the base with --base"
        )
    checkpoints = [_open_adapter(name) for name in tasks]
    merged_checkpoint = None if merged is None else _open_adapter(merged)
    merged_checkpoints = [] if merged_checkpoint is None else [merged_checkpoint]
    absent_base = AbsentBase([*merged_checkpoints, *checkpoints], base)
    architecture = Architecture.of_checkpoint(absent_base)
    pretrained = ModelWeights(absent_base, architecture)
    opened: list[LoraAdapter] = []
    weights = settings.weights or [1.0] * len(tasks)
    if len(weights) != len(tasks):
        raise ValueError(f"there are {len(weights)} weights for {len(tasks)} tasks")
    for checkpoint, weight in zip(checkpoints, weights, strict=True):
        task = LoraAdapter(checkpoint, architecture)
        task.strength = weight
        opened.append(task)
    merged_adapter = None
    before = Manifest()
    state = None
    if merged_checkpoint is not None:
        merged_adapter = LoraAdapter(merged_checkpoint, architecture)
        before = read_manifest(merged_checkpoint.folder, "merge or fetch it again") or Manifest()
        if merged_checkpoint.revision is None or STATE_FILE in before.get("files", {}):
            state_checkpoint = merged_checkpoint.open_inside(STATE_FILE)
            if state_checkpoint is not None:
                state = ModelWeights(state_checkpoint, architecture)
    adapters = opened if merged_adapter is None else [merged_adapter, *opened]
    for adapter in adapters:
        _refuse_all_but_factors(adapter)

    first_step = settings.step or before.get("step", 0) + 1
    lasting: list[ModelWeights] = [pretrained]
    if merged_adapter is not None:
        lasting.append(merged_adapter)
    tie_weights(architecture, lasting, opened, targets, first_step)
    complete_base(architecture, pretrained, adapters)
    heads = find_heads("none", pretrained, opened, architecture, before)
    selection = _adapted(select(pretrained, architecture, targets, heads), adapters, first_step)
    selection = dataclasses.replace(
        selection,
        coverage=coverage(
            architecture.model, {layer.name: layer.view for layer in selection.layers}, targets
        ),
    )
    method = method_class(
        options,
        [layer.name for layer in selection.layers],
        settings.seed,
        architecture.last_blocks,
        {layer.name: layer.view.shape for layer in selection.layers},
    )
    for task in opened:
        for param in check_shapes(selection, task, architecture):
            task.ignore(param)
        task.check_layers(selection.layers, pretrained, architecture, can_exclude=True)
    plan = Plan(
        **vars(selection),
        tasks=list(opened),
        method=method,
        settings=settings,
        before=before,
        merged=merged_adapter,
        state=state,
        adapter_keys=_keys_by_param(selection, adapters),
    )
    ranks = _ranks(plan, adapters)
    plan = dataclasses.replace(
        plan,
        settings=_settings_in_effect(plan, ranks, adapters),
        files=_files(plan, ranks),
        small_files=_small_files(plan, adapters, ranks),
    )
    warnings = _check_tokenizers(plan)
    if max(ranks.values()) > _HIGHEST_RANK_OF_VLLM:
        warnings.append(
            f"the adapter has rank {max(ranks.values())}, and vLLM takes no more than "
            f"{_HIGHEST_RANK_OF_VLLM}: --rank {_HIGHEST_RANK_OF_VLLM} cuts it"
        )
    if not absent_base.has_config and getattr(options, "ramp", 0.0) != 0:
        warnings.append(
            f"the config.json of '{absent_base.name}' is not here, so that its last block is taken "
            "to be the adapters', and the ramp ends there: --base FOLDER names one with it"
        )
    return dataclasses.replace(plan, warnings=warnings), architecture


def _open_adapter(name: str) -> Checkpoint:
    checkpoint = Checkpoint.open(name)
    if not is_adapter(checkpoint.folder):
        raise ValueError(
            f"'{name}' is a whole model, and --adapter merges adapters alone: leave it out, and "
            "name the base with --base"
        )
    return checkpoint


def _refuse_all_but_factors(adapter: LoraAdapter) -> None:
    """Refuse an adapter that holds something that is no factor of a single layer's update."""
    full = [adapter.name_of(key) for key in dict.fromkeys(adapter.keys.values())]
    experts = [param for param, update in adapter.updates.items() if update.expert is not None]
    reason = ""
    if full:
        reason = f"holds {format_names(full)} in full, of which a merge needs the base's"
    elif adapter.magnitudes:
        names = format_names(adapter.magnitudes)
        reason = f"is a DoRA, whose lengths of {names} are of the base's rows, too"
    elif experts:
        reason = f"is of fused experts ({format_names(experts)}), which it can't hold one by one"
    if reason:
        raise ValueError(
            f"adapter '{adapter.source.name}' {reason}: leave --adapter out, and name the base "
            "with --base, for a full model"
        )


def _adapted(selection: Selection, adapters: Sequence[LoraAdapter], first_step: int) -> Selection:
    """Return what adapters change of a selection."""
    changed = {param for adapter in adapters for param in adapter.params}
    layers = [layer for layer in selection.layers if layer.param in changed]
    if not layers:
        layers = selection.layers  # a check names them
    others = {}
    if selection.targets.changes_others(first_step) or first_step > 1:
        for param, keys in selection.others.items():
            if param in changed:
                others[param] = keys
    return dataclasses.replace(selection, layers=layers, others=others)


def _keys_by_param(
    selection: Selection, adapters: Sequence[LoraAdapter]
) -> dict[str, tuple[str, str]]:
    """Return the keys of A and B of each tensor that is changed, as the first adapter has them."""
    keys: dict[str, tuple[str, str]] = {}
    for param in (*(layer.param for layer in selection.layers), *selection.others):
        for adapter in adapters:
            if param in adapter.updates:
                update = adapter.updates[param]
                keys.setdefault(param, (update.key_a, update.key_b))
    return keys


def _settings_in_effect(
    plan: Plan, ranks: Mapping[str, int], adapters: Sequence[LoraAdapter]
) -> Settings:
    """Return the settings of a plan, each at its default where these adapters have the same result
    by it.
    """
    settings = plan.settings
    if settings.weights is not None and all(weight == 1 for weight in settings.weights):
        settings = dataclasses.replace(settings, weights=None)
    if settings.dtype == "float32":
        settings = dataclasses.replace(settings, dtype="auto")
    uncut = dataclasses.replace(settings, rank=None)
    if _ranks(dataclasses.replace(plan, settings=uncut), adapters) == ranks:
        settings = uncut
    return settings


def _ranks(plan: Plan, adapters: Sequence[LoraAdapter]) -> dict[str, int]:
    """Return the rank of each tensor in the result, by param."""
    ranks = {}
    for layer in plan.layers:
        shape = shape_in_basis(plan, layer)
        if shape is not None and layer.param in plan.adapter_keys:
            ranks[layer.param] = min(shape)
    for param in plan.others:
        total = sum(adapter.rank_of(param) or 0 for adapter in adapters)
        ranks[param] = min(total, *plan.pretrained.params[param])
    if plan.settings.rank is not None:
        ranks = {param: min(rank, plan.settings.rank) for param, rank in ranks.items()}
    return ranks


def _files(plan: Plan, ranks: Mapping[str, int]) -> Files:
    dtype = DTYPES.get(plan.settings.dtype, "F32")
    tensors = {}
    views = {layer.param: layer.view for layer in plan.layers}
    for param, rank in ranks.items():
        key_a, key_b = plan.adapter_keys[param]
        if param in views:
            d_o, d_i = views[param].shape
        else:
            d_o, d_i = plan.pretrained.params[param]
        if key_a.endswith(EMBEDDING_A):
            d_o, d_i = d_i, d_o
        tensors[key_a] = TensorInfo(ADAPTER_WEIGHTS, "F32", (rank, d_i), 0, 0).with_dtype(dtype)
        tensors[key_b] = TensorInfo(ADAPTER_WEIGHTS, "F32", (d_o, rank), 0, 0).with_dtype(dtype)
    return {ADAPTER_WEIGHTS: tensors}


def _small_files(
    plan: Plan, adapters: Sequence[LoraAdapter], ranks: Mapping[str, int]
) -> dict[str, bytes]:
    """Return the configuration of the result, and the tokenizer of the first adapter with one."""
    ranks_by_module = {}
    for param, rank in ranks.items():
        key_a, _ = plan.adapter_keys[param]
        module = key_a.removeprefix(PREFIX).removesuffix(EMBEDDING_A)
        ranks_by_module[module.removesuffix(".lora_A.weight")] = rank
    configs = [adapter.checkpoint.adapter_config for adapter in adapters]
    base = plan.pretrained.source
    assert isinstance(base, AbsentBase)
    content = adapter_config(configs, base.trained_on, ranks_by_module)
    files = {ADAPTER_CONFIG: (json.dumps(content, indent=2) + "\n").encode()}
    for adapter in adapters:
        tokenizer = adapter.checkpoint.small_files(TOKENIZER_FILES)
        if tokenizer:
            return tokenizer | files
    return files


def _check_tokenizers(plan: Plan) -> list[str]:
    tokenizers = []
    for adapter in plan.tasks:
        files = adapter.checkpoint.small_files(TOKENIZER_FILES)
        if files and files not in tokenizers:
            tokenizers.append(files)
    if len(tokenizers) > 1:
        return ["the tasks have different tokenizer files: the result has the first task's"]
    return []
