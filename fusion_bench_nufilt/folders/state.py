"""What a method keeps of the layers beside a merged model, so that the next merge goes on from there."""

import torch
from torch import Tensor

from fusion_bench_nufilt.methods import State
from fusion_bench_nufilt.storage.manifest import STATE_FILE, check_state
from fusion_bench_nufilt.storage.tensors import TensorInfo, dtype_name, make_header, read_header

from .architecture import Layer
from .models import FullModel
from .plan import Plan


def keeps_state(plan: Plan) -> bool:
    """Return whether the result has a file with the state.

    A state that is the merged weight alone is kept only where the model has the weight in less than float32.
    """
    narrow = any(plan.dtype(layer).itemsize < 4 for layer in plan.layers)
    return not plan.method.state_is_weight or (narrow and plan.settings.accumulate == "float32")


def state_tensors(plan: Plan, layer: Layer) -> dict[str, tuple[str, Tensor]]:
    """Return the keys of a layer's state in the file, and tensors without numbers, by the names in the state."""
    if plan.method.state_is_weight:
        shape = plan.base.tensors[layer.keys[0]].shape
        return {"weight": (layer.keys[0], torch.empty(shape, dtype=torch.float32, device="meta"))}
    theta_0 = torch.empty(layer.view.shape, dtype=plan.dtype(layer), device="meta")
    state = plan.method.start(layer.name, theta_0)
    return {name: (f"{layer.name}.{name}", value) for name, value in state.items()}


def state_bytes(plan: Plan, layer: Layer) -> int:
    """Return the bytes that a layer's state takes in the file."""
    return sum(value.numel() * value.dtype.itemsize for _, value in state_tensors(plan, layer).values())


def state_layout(plan: Plan) -> tuple[bytes, dict[str, TensorInfo]]:
    """Return the header of the file, and where it has each tensor."""
    header = make_header(dict(pair for layer in plan.layers for pair in state_tensors(plan, layer).values()))
    return header, read_header(STATE_FILE, header)


def read_state(plan: Plan, layer: Layer) -> tuple[State, str]:
    """Read the state that an earlier merge kept of a layer, empty if it kept none, and the digest of what was read."""
    kept, state, digests = plan.state, {}, ""
    for name, (key, _) in state_tensors(plan, layer).items():
        slot = layer.slot if plan.method.state_is_weight else key
        if kept is not None and slot in kept.keys:
            state[name], found = kept.checkpoint.read(kept.keys[slot])
            check_state(plan.before, key, found, kept.checkpoint.file(kept.keys[slot]).path)
            digests += found
    return state, digests


def state_to_keep(plan: Plan, layer: Layer, state: State) -> dict[str, Tensor]:
    """Return the tensors of a layer's state by their keys in the file, whose shapes and dtypes they must have."""
    if plan.method.state_is_weight:
        state = {"weight": layer.view.part(state["weight"]).to(torch.float32)}
    tensors = {}
    for name, (key, like) in state_tensors(plan, layer).items():
        if (value := state[name]).shape != like.shape or value.dtype != like.dtype:
            raise ValueError(
                f"method {plan.method.name}, layer '{layer.name}': '{name}' of its state is {value.dtype} "
                f"{tuple(value.shape)} after the last task and was {like.dtype} {tuple(like.shape)} before the first"
            )
        tensors[key] = value
    return tensors


def check_state_tensors(plan: Plan) -> list[str]:
    """Refuse a state beside the merged model from which the method can't go on; return warnings."""
    if plan.merged is None:
        return []
    name, method, kept = plan.merged.checkpoint.name, plan.method, plan.state
    before, missing, known = plan.before.get("settings", {}), [], set()
    for layer in plan.layers:
        for key, like in state_tensors(plan, layer).values():
            slot = layer.slot if method.state_is_weight else key
            known.add(slot)
            if kept is None or slot not in kept.keys:
                missing.append(key)
            else:
                _check_tensor(kept, slot, like)
    if method.state_is_weight:
        if before.get("accumulate") == "float32" and plan.settings.accumulate == "stored":
            return [f"'{name}' has the merged layers in float32; --accumulate float32 goes on from there"]
        if keeps_state(plan) and missing and plan.before:
            return [f"'{name}' does not have all merged layers in float32: going on from the rounded ones"]
        return []
    others = [] if kept is None else sorted(kept.keys.keys() - known)
    if missing or others or before.get("method", method.name) != method.name:
        what = f"no '{missing[0]}'" if missing else f"'{others[0]}'" if others else "that of another method"
        raise ValueError(
            f"the merged model '{name}' has {what} in {STATE_FILE}: {method.label} goes on from its own merges of the "
            "same layers only"
        )
    return []


def _check_tensor(kept: FullModel, slot: str, like: Tensor) -> None:
    found, shape = kept.checkpoint.tensors[kept.keys[slot]], tuple(like.shape)
    if (found.dtype, found.shape) != (dtype_name(like), shape):
        raise ValueError(
            f"'{kept.checkpoint.name}', tensor '{slot}': {found.dtype} {found.shape} is not "
            f"{str(like.dtype).removeprefix('torch.')} {shape}, as the base's layer would be; remove that folder if "
            "the weights beside it are right"
        )
