"""Plan a merge of adapters into an adapter, for which no weight of their base is read.

Layers are merged in a basis of the adapters' factors, where the base is zero, and the result has
the factors of what comes out. What adapters hold in full outside these layers is kept in full: its
mean, for which the base must be given. What no adapter holds was refused at the door.
"""

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from fusion_bench_nufilt.models.adapter_reader import AdapterReader, reader_of
from fusion_bench_nufilt.models.adapters import adapter_config
from fusion_bench_nufilt.models.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Checkpoint,
)
from fusion_bench_nufilt.models.entries import Rows
from fusion_bench_nufilt.models.into_adapter import adapters_outside
from fusion_bench_nufilt.models.lora import Factors
from fusion_bench_nufilt.models.model import ModelWeights
from fusion_bench_nufilt.models.names import module_of
from fusion_bench_nufilt.models.peft_layers import (
    EMBEDDING_A,
    ROWS,
    WHOLE,
    place_of,
    skeleton,
)
from fusion_bench_nufilt.models.vocabulary import TOKENIZER_FILES
from fusion_bench_nufilt.utils.tensors import TensorInfo

from .kept_state import KeptState
from .plan import DTYPES, FactorKeys, Plan, SavedTensor

# The ranks that vLLM has for its option max_lora_rank end here.
_HIGHEST_RANK_OF_VLLM = 512


def with_adapter(plan: Plan) -> Plan:
    """Return a plan with the files of an adapter, as peft reads them."""
    adapters = plan.merged_and_tasks
    base = plan.pretrained.checkpoint
    saved = _saved_tensors(plan, adapters)
    ranks = _ranks(plan, saved, adapters)
    reader = reader_of(adapters, base, plan.architecture)
    if reader is None:
        reader = _reader_by_names(plan, adapters, [*ranks, *saved])
    config = _config(base, saved, adapters, reader, ranks)
    shapes = reader.wrap(config)
    keys, saved = _keys(shapes, reader, ranks, saved)
    small_files = {ADAPTER_CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
    tokenizers = _tokenizers(adapters)
    if tokenizers:
        small_files |= tokenizers[0]
    tensors = _tensors(keys, saved, ranks, shapes, DTYPES.get(plan.settings.dtype, "F32"))
    reader.check(tensors, [*keys, *saved])
    warnings = list(plan.warnings)
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
    has_ramp = getattr(plan.method.options, "ramp", 0.0) != 0
    if has_ramp and base.is_absent and not base.config:
        warnings.append(
            f"the config.json of '{base.name}' is not here, so that its last block is taken "
            "to be the adapters', and the ramp ends there: --base FOLDER names one with it"
        )
    return dataclasses.replace(
        plan,
        adapter_keys=keys,
        saved_tensors=saved,
        files={ADAPTER_WEIGHTS: tensors},
        small_files=small_files,
        warnings=warnings,
    )


def _saved_tensors(plan: Plan, adapters: Sequence[ModelWeights]) -> dict[str, SavedTensor]:
    """Return by param what the result holds in full, without its keys.

    Rows that were trained stay the rows of these tokens, unless an adapter changes others, too.
    """
    sources = adapters_outside(plan.merged, plan.tasks, plan.targets, plan.first_step)
    saved = {}
    for param in plan.other_keys:
        entries = [each.entries[param] for each in sources]
        changing = [entry for entry in entries if entry.rank != 0]
        if not any(entry.is_stored for entry in changing):
            continue
        saved[param] = SavedTensor(())
        of_rows = [entry for entry in changing if isinstance(entry, Rows)]
        if len(of_rows) == len(changing):
            tokens: set[int] = set()
            for entry in of_rows:
                tokens.update(entry.numbers_there)
            saved[param] = SavedTensor((), tuple(sorted(tokens)))
    return saved


def _reader_by_names(
    plan: Plan, adapters: Sequence[ModelWeights], params: Iterable[str]
) -> AdapterReader:
    """Return what reads an adapter for a base of a class that is not known: the modules that the
    names tell.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    embeddings = set()
    names = dict.fromkeys(params)
    for param in names:
        shapes[param] = plan.pretrained.entries[param].shape
        for adapter in adapters:
            entry = adapter.entries[param]
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
    base: Checkpoint,
    saved_tensors: Mapping[str, SavedTensor],
    adapters: Sequence[ModelWeights],
    reader: AdapterReader,
    ranks: Mapping[str, int],
) -> dict[str, Any]:
    """Return the configuration of the result."""
    modules = {module_of(reader.name(param)): rank for param, rank in ranks.items()}
    configs = [adapter.checkpoint.adapter_config for adapter in adapters]
    content = adapter_config(configs, base.name_in_adapters, modules, reader.class_of_model)
    saved_modules: dict[str, None] = {}
    tokens_by_module = {}
    in_full = [*ranks]
    for param, saved in saved_tensors.items():
        name = reader.name(param)
        if saved.tokens is not None:
            tokens_by_module[module_of(name)] = list(saved.tokens)
        elif name.endswith("bias") and not any(
            module_of(param) in (adapter.trained_modules or ()) for adapter in adapters
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


def _ranks(plan: Plan, saved: Collection[str], adapters: Sequence[ModelWeights]) -> dict[str, int]:
    """Return the rank of each tensor in the result that has factors, by param."""
    ranks = {}
    kept = KeptState(plan)
    for layer in plan.layers:
        if any(adapter.entries[layer.param].rank for adapter in adapters):
            ranks[layer.param] = min(kept.shape_in_basis(layer) or layer.view.shape)
    for param in plan.other_keys:
        if param not in saved:
            total = 0 if plan.merged is None else plan.merged.entries[param].rank or 0
            for task in plan.joining(param):
                total += task.entries[param].rank or 0
            ranks[param] = min(total, *plan.pretrained.entries[param].shape)
    if plan.settings.rank is not None:
        ranks = {param: min(rank, plan.settings.rank) for param, rank in ranks.items()}
    return ranks


def _tensors(
    factor_keys: Mapping[str, Sequence[FactorKeys]],
    saved: Mapping[str, SavedTensor],
    params: Iterable[str],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
) -> dict[str, TensorInfo]:
    """Return the tensors in the result's file, those of the ``params`` that have factors first."""
    keys: list[str] = []
    for param in params:
        for pair in factor_keys[param]:
            keys += [pair.a, pair.b]
    for saved_tensor in saved.values():
        keys += saved_tensor.keys
    tensors = {}
    for key in keys:
        tensors[key] = TensorInfo(ADAPTER_WEIGHTS, "F32", shapes[key], 0, 0).with_dtype(dtype)
    return tensors


def _tokenizers(adapters: Sequence[ModelWeights]) -> list[dict[str, bytes]]:
    """Return the files of the tokenizers of adapters that have one, the same ones once."""
    tokenizers = []
    for adapter in adapters:
        files = adapter.checkpoint.small_files(TOKENIZER_FILES)
        if files and files not in tokenizers:
            tokenizers.append(files)
    return tokenizers
