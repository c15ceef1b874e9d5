"""The file beside the model's weights: what the next merge needs, in float32 at least.

It has what the method keeps of each layer (for NUFILT, the layer itself), and the running means of
tensors outside the layers, where the model rounds them.
"""

import torch
from torch import Tensor

from fusion_bench_nufilt.models.architecture import Layer
from fusion_bench_nufilt.models.vocabulary import new_rows_key
from fusion_bench_nufilt.utils.manifest import STATE_FILE
from fusion_bench_nufilt.utils.tensors import TensorInfo, describe, make_header, read_header

from .plan import Plan


def state_tensors(plan: Plan, layer: Layer) -> dict[str, tuple[str, str, Tensor]]:
    """Return for each tensor of a layer's state, by name, its key and param in the file, and a meta
    tensor like it.
    """
    if plan.method.is_stateless:
        key = layer.keys[0]
        return {"weight": (key, layer.param, _wide_like(plan, key))}
    shape = (1, *layer.view.shape)
    # On meta, a method tells the shapes of its state and takes no memory for it.
    base = torch.empty(shape, dtype=plan.dtype(layer.keys[0]), device="meta")
    tensors = {}
    for name, value in plan.method.init_state([layer.name], base).items():
        key = f"{layer.name}.{name}"
        tensors[name] = (key, key, value[0])
    return tensors


def has_state(plan: Plan, layer: Layer) -> bool:
    """Tell whether a layer has a state that the result's weight does not tell by itself."""
    return not plan.method.is_stateless or plan.rounds(layer.keys[0])


def mean_key(param: str) -> str:
    """Return the key of the running mean of a tensor outside the layers."""
    return f"{param}.mean"


def means_to_keep(plan: Plan) -> dict[str, Tensor]:
    """Return a meta tensor for each running mean that the model alone would round, by param."""
    if plan.targets.other_params != "mean":
        return {}
    kept = {}
    for param, keys in plan.others.items():
        if param in plan.averaged and plan.rounds(keys[0]):
            kept[param] = _wide_like(plan, keys[0])
    return kept


def new_rows_to_keep(plan: Plan) -> dict[str, Tensor]:
    """Return a meta tensor for the rows of new tokens that the model alone would round, by param
    of the tensor that has them.
    """
    if plan.targets.other_params == "first" or not plan.vocabulary.tokens:
        return {}
    kept = {}
    for param in plan.vocabulary.params:
        if plan.rounds(plan.pretrained.keys[param]):
            shape = (len(plan.vocabulary.tokens), *plan.pretrained.params[param][1:])
            kept[param] = torch.empty(shape, dtype=torch.float32, device="meta")
    return kept


def _wide_like(plan: Plan, key: str) -> Tensor:
    dtype = torch.promote_types(plan.dtype(key), torch.float32)
    return torch.empty(plan.base.tensors[key].shape, dtype=dtype, device="meta")


def stored_keys(plan: Plan) -> dict[str, str]:
    """Return the keys of what is kept beside the merged model, by the keys that this merge has for
    the same tensors.
    """
    stored = plan.state.keys if plan.state else {}
    params = {}
    if plan.targets.other_params == "mean":
        params = {mean_key(param): mean_key(param) for param in plan.others}
    for layer in plan.layers:
        for key, param, _ in state_tensors(plan, layer).values():
            params[key] = param
    return {key: stored[param] for key, param in params.items() if param in stored}


def state_layout(plan: Plan) -> tuple[bytes, dict[str, TensorInfo]]:
    """Return the header and the tensors of the state's file, which are empty if there is none."""
    kept: dict[str, TensorInfo] = {}
    if plan.keeps_state:
        for layer in plan.layers:
            if has_state(plan, layer):
                for key, _, like in state_tensors(plan, layer).values():
                    kept[key] = describe(like)
        for param, like in means_to_keep(plan).items():
            kept[mean_key(param)] = describe(like)
        for param, like in new_rows_to_keep(plan).items():
            kept[new_rows_key(param)] = describe(like)
    if not kept:
        return b"", {}
    header = make_header(kept)
    return header, read_header(STATE_FILE, header)
