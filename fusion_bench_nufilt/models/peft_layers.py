"""What peft makes of the factors that an adapter has, and what their keys say.

Scalings, ranks and kinds of layers are for the installed peft to say: it wraps modules on PyTorch's
meta device, which have the names and shapes that the adapter's keys tell, by the adapter's own
configuration.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import nn

from fusion_bench_nufilt.utils.files import message_in_one_line

from .architecture import Architecture
from .checkpoint import Checkpoint
from .layers import without_numbers
from .names import module_of, submodule

PREFIX = "base_model.model."
#: The end of a message about an adapter that only peft can merge.
WITH_PEFT = "with peft (merge_and_unload), and give that folder"

# Of an embedding, A is (rank, tokens) and B is (d, rank): they hold the transpose of the update.
EMBEDDING_A = ".lora_embedding_A"
#: The parts of a parameter that an adapter may have under a key, beside A and B of an update.
ROWS = "rows"
LENGTHS = "lengths"
WHOLE = "whole"

#: In the keys of what the wrapper of a module that is held in full has.
SAVED = ".modules_to_save."

# How the keys of parts end.
_PARTS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    EMBEDDING_A: "A",
    ".lora_embedding_B": "B",
    ".lora_magnitude_vector": LENGTHS,
    ".token_adapter.trainable_tokens_delta": ROWS,
}
_PATTERNS = ("rank_pattern", "alpha_pattern")
_DORA = ("DoraLinearVariant", "DoraEmbeddingVariant")
# What a configuration has of the way in which the factors were trained, or of the modules, which
# the keys name: nothing that changes what the factors are.
_NOT_OF_FACTORS = (
    *("peft_type", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("modules_to_save", "trainable_token_indices", "bias"),
    *("fan_in_fan_out", "lora_dropout", "init_lora_weights", "loftq_config", "eva_config"),
    *("corda_config", "lora_ga_config", "velora_config", "megatron_config", "megatron_core"),
    *("runtime_config", "auto_mapping"),
)


class Place(NamedTuple):
    """What an adapter has under a key."""

    name: str  # of the parameter, in the class that the adapter is for
    part: str  # A or B of its update, the lengths of its rows, some rows, or all of it

    @property
    def module(self) -> str:
        return module_of(self.name)


def place_of(key: str) -> Place:
    """Return what peft has under a key, whose prefix may be gone.

    The prefix is there more than once where peft wrapped what it had wrapped, and in the middle
    where a part of a model was wrapped, and the whole was saved.
    """
    name = re.sub(rf"(^|(?<=\.)){re.escape(PREFIX)}", "", key)
    for suffix, part in _PARTS.items():
        if name.endswith(suffix):
            return Place(f"{name.removesuffix(suffix)}.weight", part)
    return Place(name.replace(".base_layer.", ".").replace(SAVED, "."), WHOLE)


def auto_class(adapter_config: Mapping[str, Any]) -> Any:
    """Return the class of transformers that loads models for an adapter's type of task, as peft
    has it; None if the adapter names no type.
    """
    from peft import MODEL_TYPE_TO_PEFT_MODEL_MAPPING, auto

    wrapper = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(str(adapter_config.get("task_type")))
    for kind in vars(auto).values():
        if wrapper is not None and getattr(kind, "_target_peft_class", None) is wrapper:
            return kind._target_class
    return None


def outer_module(path: str) -> str:
    """Return the path of the module that peft wrapped, once for each of its parameters, each time
    what it had wrapped.
    """
    return path.partition(".base_layer")[0]


@dataclass(frozen=True)
class PeftLayer:
    """What peft says of the factors of a module."""

    shapes: Mapping[str, tuple[int, ...]]  # of its tensors, by part
    rank: int
    scaling: float  # what their product is multiplied by
    parameter: str  # that is changed by itself, empty for the weight of a module

    @property
    def shapes_of_transpose(self) -> dict[str, tuple[int, ...]]:
        """The shapes for the transpose of the update, which another version of peft may have of
        experts.
        """
        rank, d_i = self.shapes["A"]
        d_o, _ = self.shapes["B"]
        return {**self.shapes, "A": (rank, d_o), "B": (d_i, rank)}


class UnknownLayersError(ValueError):
    """Peft makes something else of an adapter than the product of two factors."""


def ask_peft(
    adapter: Checkpoint,
    keys: Mapping[str, Mapping[str, str]],
    architecture: Architecture,
) -> dict[str, PeftLayer]:
    """Return what peft says of the modules of which an adapter has factors.

    Args:
        adapter: whose configuration is asked for.
        keys: those of each module by part; a module may be in another one called ``base_layer``.
        architecture: that of the base, which knows the parameters that hold experts.

    Raises:
        UnknownLayersError: peft makes no layers of them, or others than we know.
    """
    config: Mapping[str, Any] = adapter.adapter_config
    shapes: dict[str, tuple[int, ...]] = {}
    embeddings = set()
    targets = []
    # Wrapping takes peft milliseconds for each module, so that one stands for all like it.
    stand_ins: dict[Hashable, str] = {}
    stands_for: dict[str, str] = {}
    try:
        for module, parts in keys.items():
            outer = outer_module(module)
            stacks = architecture.stacks_of(outer)
            if stacks:
                stands_for[module] = module
                for attribute, name in stacks.items():
                    shapes[f"{outer}.{attribute}"] = architecture.stacks[name]
                continue
            # Of a factor that is lacking, no side has to be right.
            d_o = adapter.tensors[parts["B"]].shape[0] if "B" in parts else 1
            d_i = adapter.tensors[parts["A"]].shape[1] if "A" in parts else 1
            of_embedding = parts.get("A", "").endswith(EMBEDDING_A)
            values = [_value_for(module, config, field) for field in _PATTERNS]
            kind = (without_numbers(module), of_embedding, d_o, d_i, *values)
            stands_for[module] = stand_ins.setdefault(kind, module)
            if stands_for[module] != module:
                continue
            name = f"{module}.weight"
            shapes[name] = (d_o, d_i)
            if of_embedding:
                shapes[name] = (d_i, d_o)
                embeddings.add(name)
            parameters = config.get("target_parameters") or ()
            if not any(f".{name}".endswith(f".{parameter}") for parameter in parameters):
                targets.append(module)
        model = skeleton(shapes, embeddings)
        _tie_to_embedding(model, keys, architecture)
        layers = _wrapped_layers(model, config, targets)
    except Exception as error:  # whatever peft finds wrong with it
        raise UnknownLayersError(_problem(error)) from error
    return {module: layers[other] for module, other in stands_for.items() if other in layers}


def _tie_to_embedding(model: Any, modules: Iterable[str], architecture: Architecture) -> None:
    """Have a model say which of its modules are tied to its embedding, as those of transformers do;
    with ``ensure_weight_tying``, peft gives them its factors.
    """
    paths = {architecture.model_name(f"{module}.weight"): module for module in modules}
    embedding = paths.pop(architecture.embedding, None)
    if embedding is not None:
        tied = [paths[name] for name in architecture.tied_to_embedding if name in paths]
        model._tied_weights_keys = [f"{path}.weight" for path in tied]
        model.get_input_embeddings = lambda: model.get_submodule(embedding)


def _value_for(module: str, config: Mapping[str, Any], field: str) -> Any:
    """Return the value of the pattern by which peft finds a module, None if there is none."""
    from peft.utils.other import get_pattern_key

    values = config.get(field) or {}
    try:
        return values.get(get_pattern_key(list(values), module))
    except re.error as error:
        raise UnknownLayersError(
            f"has a {field} in its adapter_config.json with an expression that is none ({error})"
        ) from error


def _problem(error: Exception) -> str:
    import peft

    if isinstance(error, UnknownLayersError):
        return str(error)
    return (
        f"has an adapter_config.json that peft {peft.__version__} can't use for it "
        f"({message_in_one_line(error)})"
    )


def _wrapped_layers(
    model: nn.Module, config: Mapping[str, Any], targets: Collection[str]
) -> dict[str, PeftLayer]:
    """Return what peft says of the layers that it wraps in a model, by path."""
    from peft import LoraConfig, PeftModel, get_peft_model_state_dict
    from peft.tuners.lora import LoraLayer

    if next(model.parameters(), None) is None:
        return {}
    options = {}
    known = {field.name for field in fields(LoraConfig)}
    for name, value in config.items():
        if name in known and name not in _NOT_OF_FACTORS:
            options[name] = value
        # What a word or a number chooses is chosen by another option.
        elif name not in known and (value is True or (value and isinstance(value, list | dict))):
            raise UnknownLayersError(f"uses {name}")
    if options.pop("layer_replication", None):
        raise UnknownLayersError("uses layer_replication")
    options |= {"target_modules": list(targets), "init_lora_weights": False}
    with warnings.catch_warnings(action="ignore"):  # for those who train
        wrapped = PeftModel(model, LoraConfig(**options), low_cpu_mem_usage=True)
        state = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    shapes: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for key, tensor in state.items():
        place = place_of(key)
        shapes[place.module][place.part] = tuple(tensor.shape)
    layers = {}
    for path, layer in wrapped.get_base_model().named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        for variant in layer.lora_variant.values():
            if type(variant).__name__ not in _DORA:
                raise UnknownLayersError(f"has layers of peft's {type(variant).__name__}")
        if any(layer.lora_bias.values()):
            raise UnknownLayersError("uses lora_bias")
        (name,) = layer.r
        parameter = getattr(layer, "parameter_name", "")
        scaling = float(layer.scaling[name])
        # Of a tied layer, it is the embedding's, whatever the layer says.
        rank = shapes[path]["A"][0] // getattr(layer, "num_experts", 1)
        layers[path] = PeftLayer(shapes[path], rank, scaling, parameter)
    return layers


def skeleton(shapes: Mapping[str, tuple[int, ...]], embeddings: Collection[str]) -> nn.Module:
    """Return a model that has some parameters and nothing else, in the modules that their names
    tell: linear ones with a matrix, but for those of the ``embeddings``.
    """
    root = nn.Module()
    with torch.device("meta"):
        for name, shape in shapes.items():
            path, _, attribute = name.rpartition(".")
            *parents, last = path.split(".")
            if attribute == "weight" and len(shape) == 2:
                module: nn.Module = nn.Linear(shape[1], shape[0], bias=False)
                if name in embeddings:
                    module = nn.Embedding(*shape)
                submodule(root, parents).add_module(last, module)
            else:
                parameter = nn.Parameter(torch.empty(shape, dtype=torch.float32, device="meta"))
                submodule(root, path.split(".")).register_parameter(attribute, parameter)
    return root
