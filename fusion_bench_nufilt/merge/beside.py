"""The file beside the model's weights: what the method keeps to go on."""

import torch
from torch import Tensor

from fusion_bench_nufilt.storage.checkpoint import STATE_FILE
from fusion_bench_nufilt.storage.tensors import TensorInfo, describe, make_header, read_header

from .architecture import Layer
from .plan import Plan


def state_tensors(plan: Plan, layer: Layer) -> dict[str, tuple[str, str, Tensor]]:
    """Return for each tensor of a layer's state, by name, its key and param in the file, and a meta
    tensor like it.
    """
    if plan.method.state_is_weight:
        shape = plan.base.tensors[layer.keys[0]].shape
        return {
            "weight": (
                layer.keys[0],
                layer.param,
                torch.empty(shape, dtype=torch.float32, device="meta"),
            )
        }
    theta_0 = torch.empty(layer.view.shape, dtype=plan.dtype(layer.keys[0]), device="meta")
    state = plan.method.start(layer.name, theta_0)
    return {name: (key := f"{layer.name}.{name}", key, value) for name, value in state.items()}


def state_layout(plan: Plan) -> tuple[bytes, dict[str, TensorInfo]]:
    """Return the header and the tensors of the file of the state, which are empty if that is not
    kept.
    """
    if not plan.keeps_state:
        return b"", {}
    kept = (tensor for layer in plan.layers for tensor in state_tensors(plan, layer).values())
    header = make_header({key: describe(like) for key, _, like in kept})
    return header, read_header(STATE_FILE, header)
