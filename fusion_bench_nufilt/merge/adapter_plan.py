"""Plan a merge of adapters into an adapter, for which no weight of their base is read.

Layers are merged in a basis of the adapters' factors, where the base is zero, and the result has
the factors of what comes out. What adapters hold in full outside these layers is kept in full: its
mean, for which the base must be given. What no adapter holds is refused.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fusion_bench_nufilt.methods.base import LayerMethod
from fusion_bench_nufilt.methods.options import Settings, TargetConfig
from fusion_bench_nufilt.models.absent_base import AbsentBase
from fusion_bench_nufilt.models.adapter_reader import INTO_A_MODEL, AdapterReader, reader_of
from fusion_bench_nufilt.models.adapters import (
    LoraAdapter,
    adapter_config,
    refuse_adapter_of_others,
)
from fusion_bench_nufilt.models.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Checkpoint,
    is_adapter,
)
from fusion_bench_nufilt.models.door import Models, open_models
from fusion_bench_nufilt.models.entries import Rows
from fusion_bench_nufilt.models.experts import ExpertRows, FactorsOfExpert
from fusion_bench_nufilt.models.lora import Dora, Factors
from fusion_bench_nufilt.models.names import module_of
from fusion_bench_nufilt.models.peft_layers import (
    EMBEDDING_A,
    ROWS,
    WHOLE,
    place_of,
    skeleton,
)
from fusion_bench_nufilt.models.source import format_names
from fusion_bench_nufilt.models.vocabulary import TOKENIZER_FILES
from fusion_bench_nufilt.utils.tensors import TensorInfo

from .checks import check_tensors
from .kept_state import KeptState
from .plan import (
    DTYPES,
    FactorKeys,
    Files,
    Plan,
    SavedTensor,
    Selection,
    add_head_of,
    heads_of_base,
    method_of,
)

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
) -> Plan:
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
    all_checkpoints = list(checkpoints)
    merged_checkpoint = None
    if merged is not None:
        merged_checkpoint = _open_adapter(merged)
        all_checkpoints.insert(0, merged_checkpoint)
    absent_base = AbsentBase(all_checkpoints, base)
    models = open_models(absent_base, checkpoints, merged_checkpoint, targets, settings)
    _refuse_what_no_adapter_holds(models, targets)
    first_step = settings.first_step(models.merged_manifest)
    for adapter in _sources_outside(models, targets, first_step):
        if any(entry.key for entry in adapter.entries.values()):
            with_weights = _open_base(base, adapter, is_merged=adapter is models.merged)
            models = open_models(with_weights, checkpoints, merged_checkpoint, targets, settings)
            break
    architecture = models.architecture
    pretrained = models.pretrained
    adapters = models.adapters
    sources_outside = _sources_outside(models, targets, first_step)
    heads = heads_of_base(architecture, pretrained, "none", models.merged_manifest)
    of_model = Selection.of(architecture, pretrained, targets, heads)
    selection = _adapted(of_model, adapters, sources_outside)
    of_others = targets
    if not selection.other_keys:  # no adapter changes what else the model has
        of_others = dataclasses.replace(targets, other_params="pretrained")
    covered = architecture.coverage(selection.layers, of_others)
    selection = dataclasses.replace(selection, coverage=covered)
    for task in models.tasks:
        check_tensors(selection, task)
    for adapter in adapters:
        _refuse_full_layers(adapter, selection)
    method = method_of(method_class, options, settings.seed, selection)
    plan = Plan(
        **vars(selection),
        tasks=models.tasks,
        method=method,
        settings=settings,
        merged_manifest=models.merged_manifest,
        merged=models.merged,
        state=models.state,
        layers_of_model=of_model.layers,
    )
    tokens = _tokens_of_saved(plan, sources_outside)
    saved = {param: SavedTensor((), tokens[param]) for param in tokens}
    plan = dataclasses.replace(plan, saved_tensors=saved)
    ranks = _ranks(plan, adapters)
    reader = reader_of(adapters, pretrained.checkpoint, architecture)
    if reader is None:
        reader = _reader_by_names(plan, adapters, ranks)
    config = _config(plan, adapters, absent_base.trained_on, reader, ranks)
    shapes = reader.wrap(config)
    keys, saved = _keys(shapes, reader, ranks, plan.saved_tensors)
    plan = dataclasses.replace(plan, adapter_keys=keys, saved_tensors=saved)
    small_files = {ADAPTER_CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
    tokenizers = _tokenizers(adapters)
    if tokenizers:
        small_files |= tokenizers[0]
    plan = dataclasses.replace(plan, files=_files(plan, ranks, shapes), small_files=small_files)
    reader.check(plan.files[ADAPTER_WEIGHTS], [*keys, *saved])
    warnings = []
    if len(tokenizers) > 1:
        warnings.append(
            "the adapters have different tokenizer files: the result has those of the first one "
            "that has some"
        )
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
    return dataclasses.replace(plan, warnings=warnings)


def _open_adapter(name: str) -> Checkpoint:
    checkpoint = Checkpoint.open(name)
    if not is_adapter(checkpoint.folder):
        refuse_adapter_of_others(checkpoint)
        raise ValueError(
            f"'{name}' is a whole model, and --adapter merges adapters alone: leave it out, and "
            "name the base with --base"
        )
    return checkpoint


def _sources_outside(models: Models, targets: TargetConfig, first_step: int) -> list[LoraAdapter]:
    """Return the adapters from which the result has tensors outside the merged layers."""
    if targets.other_params == "mean":
        return models.adapters
    sources = [models.merged]
    if targets.changes_other_params(first_step):
        sources.append(models.tasks[0])
    return [adapter for adapter in models.adapters if adapter in sources]


def _open_base(name: str | None, adapter: LoraAdapter, *, is_merged: bool) -> Checkpoint:
    """Open the base with its weights, since an adapter holds tensors in full."""
    if name is None:
        keys = dict.fromkeys(entry.key for entry in adapter.entries.values() if entry.key)
        full = [adapter.name_of(key) for key in keys]
        other_way = ""
        if not is_merged:
            other_way = ", or leave them as they are in it with --other-params pretrained"
        raise ValueError(
            f"adapter '{adapter.source.name}' holds {format_names(full)} in full, of which a mean "
            f"needs the base's: name the folder of the base with --base{other_way}"
        )
    return Checkpoint.open(name)


def _refuse_what_no_adapter_holds(models: Models, targets: TargetConfig) -> None:
    heads = heads_of_base(
        models.architecture, models.pretrained, targets.heads, models.merged_manifest
    )
    for task in models.tasks:
        add_head_of(heads, task)
    for adapter in models.adapters:
        of_heads = heads.of(param for param, entry in adapter.entries.items() if entry.key)
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


def _refuse_full_layers(adapter: LoraAdapter, selection: Selection) -> None:
    full = [layer.param for layer in selection.layers if adapter.info(layer.param)]
    if full:
        raise ValueError(
            f"adapter '{adapter.source.name}' holds {format_names(full)} in full, which is merged "
            f"as a layer and has no factors: {INTO_A_MODEL}"
        )


def _adapted(
    selection: Selection, adapters: Sequence[LoraAdapter], sources_outside: Sequence[LoraAdapter]
) -> Selection:
    """Return what adapters change of a selection, some of them outside the layers as well."""
    changed: set[str] = set()
    for adapter in adapters:
        changed.update(adapter.entries)
    layers = [layer for layer in selection.layers if layer.param in changed]
    if not layers:
        layers = selection.layers  # a check names them
    changed_outside: set[str] = set()
    for adapter in sources_outside:
        changed_outside.update(adapter.entries)
    other_keys = {}
    for param, keys in selection.other_keys.items():
        if param in changed_outside:
            other_keys[param] = keys
    return dataclasses.replace(selection, layers=layers, other_keys=other_keys)


def _tokens_of_saved(
    plan: Plan, sources: Sequence[LoraAdapter]
) -> dict[str, tuple[int, ...] | None]:
    """Return by param what the result holds in full, with the tokens whose rows these are, if it is
    not all of it.

    Rows that were trained stay the rows of these tokens, unless an adapter changes others, too.
    """
    tokens_by_param: dict[str, tuple[int, ...] | None] = {}
    for param in plan.other_keys:
        changing = [each.entries[param] for each in sources if param in each.entries]
        if not any(entry.key for entry in changing):
            continue
        tokens_by_param[param] = None
        of_rows = [entry for entry in changing if isinstance(entry, Rows)]
        if len(of_rows) == len(changing):
            tokens: set[int] = set()
            for entry in of_rows:
                tokens.update(entry.numbers_there)
            tokens_by_param[param] = tuple(sorted(tokens))
    return tokens_by_param


def _reader_by_names(
    plan: Plan, adapters: Sequence[LoraAdapter], ranks: Mapping[str, int]
) -> AdapterReader:
    """Return what reads an adapter for a base of a class that is not known: the modules that the
    names tell.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    embeddings = set()
    names = dict.fromkeys([*ranks, *plan.saved_tensors])
    for param in names:
        shapes[param] = plan.pretrained.entries[param].shape
        for adapter in adapters:
            entry = adapter.entries.get(param)
            if isinstance(entry, Rows) or (isinstance(entry, Factors) and entry.of_embedding):
                embeddings.add(param)
        parts = param.split(".")
        for start in range(1, len(parts)):
            shorter = ".".join(parts[start:])
            if shorter in names:
                raise ValueError(
                    f"the adapters change '{shorter}' and '{param}', which may be one layer in two "
                    "classes of the model: --base FOLDER names a base whose config.json tells"
                )
    return AdapterReader(skeleton(shapes, embeddings), plan.architecture)


def _config(
    plan: Plan,
    adapters: Sequence[LoraAdapter],
    base_name: str | None,
    reader: AdapterReader,
    ranks: Mapping[str, int],
) -> dict[str, Any]:
    """Return the configuration of the result."""
    modules = {module_of(reader.name(param)): rank for param, rank in ranks.items()}
    configs = [adapter.checkpoint.adapter_config for adapter in adapters]
    content = adapter_config(configs, base_name, modules, reader.class_of_model)
    saved_modules: dict[str, None] = {}
    tokens_by_module = {}
    in_full = [*ranks]
    for param, saved in plan.saved_tensors.items():
        name = reader.name(param)
        if saved.tokens is not None:
            tokens_by_module[module_of(name)] = list(saved.tokens)
        elif name.endswith("bias") and not any(
            param in adapter.trained_params for adapter in adapters
        ):
            content["bias"] = "all"
        else:
            saved_modules[module_of(name)] = None
            in_full.append(param)
    if saved_modules:
        content["modules_to_save"] = list(saved_modules)
    if tokens_by_module:
        content["trainable_token_indices"] = tokens_by_module
    # Rows of tokens are those of all names by themselves.
    if any(len(reader.names[param]) > 1 for param in in_full):
        content["ensure_weight_tying"] = True
    return content


def _keys(
    shapes: Mapping[str, tuple[int, ...]],
    reader: AdapterReader,
    ranks: Mapping[str, int],
    saved: Mapping[str, SavedTensor],
) -> tuple[dict[str, list[FactorKeys]], dict[str, SavedTensor]]:
    """Return the keys of what has factors in the result, and of what it holds in full, given the
    shapes by key of what an adapter of its configuration has.
    """
    keys_by_name: dict[str, dict[str, str]] = {}
    for key in shapes:
        place = place_of(key)
        keys_by_name.setdefault(place.name, {})[place.part] = key
    factor_keys: dict[str, list[FactorKeys]] = {}
    saved_keys: dict[str, SavedTensor] = {}
    for name, keys in keys_by_name.items():
        param = reader.param(name)
        if param in ranks and "A" in keys:
            if shapes[keys["A"]][0] != ranks[param]:
                reader.refuse(f"it would have another rank for '{name}'")
            of_embedding = keys["A"].endswith(EMBEDDING_A)
            pair = FactorKeys(keys["A"], keys["B"], of_embedding)
            factor_keys.setdefault(param, []).append(pair)
        elif param in saved:
            tokens = saved[param].tokens
            key = keys[WHOLE if tokens is None else ROWS]
            earlier = saved_keys.get(param, SavedTensor(()))
            saved_keys[param] = SavedTensor((*earlier.keys, key), tokens)
        # With some biases, peft saves all tensors of such a name.
        elif "bias" not in name:
            reader.refuse(f"it would have '{name}' as well")
    for param in (*ranks, *saved):
        if param not in factor_keys and param not in saved_keys:
            reader.refuse(f"it would not have '{param}' by itself")
    return factor_keys, saved_keys


def _ranks(plan: Plan, adapters: Sequence[LoraAdapter]) -> dict[str, int]:
    """Return the rank of each tensor in the result that has factors, by param."""
    ranks = {}
    kept = KeptState(plan)
    for layer in plan.layers:
        if any(adapter.rank_of(layer.param) for adapter in adapters):
            ranks[layer.param] = min(kept.shape_in_basis(layer) or layer.view.shape)
    for param in plan.other_keys:
        if param not in plan.saved_tensors:
            total = 0 if plan.merged is None else plan.merged.rank_of(param) or 0
            for task in plan.joining(param):
                total += task.rank_of(param) or 0
            ranks[param] = min(total, *plan.pretrained.entries[param].shape)
    if plan.settings.rank is not None:
        ranks = {param: min(rank, plan.settings.rank) for param, rank in ranks.items()}
    return ranks


def _files(plan: Plan, params: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> Files:
    """Return the tensors in the result's file, those of the ``params`` that have factors first."""
    keys: list[str] = []
    for param in params:
        for pair in plan.adapter_keys[param]:
            keys += [pair.a, pair.b]
    for saved in plan.saved_tensors.values():
        keys += saved.keys
    dtype = DTYPES.get(plan.settings.dtype, "F32")
    tensors = {}
    for key in keys:
        tensors[key] = TensorInfo(ADAPTER_WEIGHTS, "F32", shapes[key], 0, 0).with_dtype(dtype)
    return {ADAPTER_WEIGHTS: tensors}


def _tokenizers(adapters: Sequence[LoraAdapter]) -> list[dict[str, bytes]]:
    """Return the files of the tokenizers of adapters that have one, the same ones once."""
    tokenizers = []
    for adapter in adapters:
        files = adapter.checkpoint.small_files(TOKENIZER_FILES)
        if files and files not in tokenizers:
            tokenizers.append(files)
    return tokenizers
