"""The weight files beside the model's: what the method keeps to go on, and updates whose strength is not known yet."""

import torch
from torch import Tensor

from fusion_bench_nufilt.storage.checkpoint import STATE_FILE
from fusion_bench_nufilt.storage.tensors import TensorInfo, describe, make_header, read_header

from .architecture import Layer
from .plan import Plan

#: The updates of strength 1, by layer, until that of the whole merge is known; the result does not have this file.
UPDATES = ".updates.safetensors"


def state_tensors(plan: Plan, layer: Layer) -> dict[str, tuple[str, str, Tensor]]:
    """Return for each tensor of a layer's state, by name, its key and param in the file, and a meta tensor like it."""
    if plan.method.state_is_weight:
        shape = plan.base.tensors[layer.keys[0]].shape
        return {"weight": (layer.keys[0], layer.param, torch.empty(shape, dtype=torch.float32, device="meta"))}
    theta_0 = torch.empty(layer.view.shape, dtype=plan.dtype(layer.keys[0]), device="meta")
    state = plan.method.start(layer.name, theta_0)
    return {name: (key := f"{layer.name}.{name}", key, value) for name, value in state.items()}


def files_beside(plan: Plan) -> dict[str, tuple[bytes, dict[str, TensorInfo]]]:
    """Return the header and the tensors of the weight files beside the model's: the state, and updates by layer."""
    files = {}
    if plan.keeps_state:
        kept = (tensor for layer in plan.layers for tensor in state_tensors(plan, layer).values())
        files[STATE_FILE] = {key: describe(like) for key, _, like in kept}
    if plan.method.finds_scale:
        files[UPDATES] = {layer.name: describe(_like_update(plan, layer.keys[0])) for layer in plan.layers}
    headers = {file: make_header(tensors) for file, tensors in files.items()}
    return {file: (header, read_header(file, header)) for file, header in headers.items()}


def _like_update(plan: Plan, key: str) -> Tensor:
    dtype = torch.promote_types(plan.dtype(key), torch.float32)
    return torch.empty(plan.base.tensors[key].shape, dtype=dtype, device="meta")
