"""The bytes of merged layers in the result's files."""

from collections.abc import Callable

import torch
from torch import Tensor

from fusion_bench_nufilt.core.weights import is_finite
from fusion_bench_nufilt.methods import State
from fusion_bench_nufilt.storage.checkpoint import STATE_FILE
from fusion_bench_nufilt.storage.tensors import FLOATS, TensorInfo, digest, raw

from .architecture import Layer
from .beside import UPDATES, files_beside, state_tensors
from .engine import MergedLayer
from .output import Record
from .plan import Plan
from .sources.fp8 import Quantised


class LayerBytes:
    """Turns the layers of a plan into the bytes of its files."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._beside = {file: tensors for file, (_, tensors) in files_beside(plan).items()}

    def __call__(self, merged: MergedLayer, weigh: Callable[[], Tensor]) -> list[memoryview]:
        """Return the bytes of a layer's state, if it is kept, and of its weight; note their places in its record.

        In place of the weight, a method that finds its scale has an update.
        """
        plan, layer, record = self.plan, merged.layer, merged.record
        weight = weigh()
        if plan.method.finds_scale:
            stored = [(self._beside[UPDATES][layer.name], weight)]
        else:
            stored = stored_weight(plan, layer, weight, record)
        if STATE_FILE in self._beside:
            kept = _state_to_keep(plan, layer, merged.state)
            stored = [*((self._beside[STATE_FILE][key], value) for key, value in kept.items()), *stored]
        return note_written(record, stored)


Stored = list[tuple[TensorInfo, Tensor]]
"""Tensors and their places in files."""


def stored_weight(plan: Plan, layer: Layer, weight: Tensor, record: Record) -> Stored:
    """Return what the result stores for the weight of a layer; digests of what is read for it go into the record."""
    stored: Stored = []
    weight = plan.vocabulary.grown_layer(layer.param, weight, record["read"])
    for key in layer.keys:
        place = plan.places[key]
        new = place.quantise(weight) if isinstance(place, Quantised) else [(place, weight.to(FLOATS[place.dtype]))]
        if not is_finite(new[-1][1]):  # the scale, if there is one: FP8 values are clamped
            raise ValueError(f"tensor '{key}': the merged weight is too large for {place.dtype}")
        stored += new
    return stored


def note_written(record: Record, stored: Stored) -> list[memoryview]:
    """Add the places of tensors to a record, and return their bytes."""
    here = [(info, value.cpu()) for info, value in stored]
    record["written"] += [(info.file, info.start, info.stop, digest(value)) for info, value in here]
    return [raw(value) for _, value in here]


def _state_to_keep(plan: Plan, layer: Layer, state: State) -> dict[str, Tensor]:
    """Return the tensors of a layer's state by their keys in the file, whose shapes and dtypes they must have."""
    if plan.method.state_is_weight:
        state = {"weight": layer.view.part(state["weight"]).to(torch.float32)}
    tensors = {}
    for name, (key, _, like) in state_tensors(plan, layer).items():
        if (value := state[name]).shape != like.shape or value.dtype != like.dtype:
            after, before = (f"{each.dtype} {tuple(each.shape)}" for each in (value, like))
            what = f"'{name}' of its state is {after} after the last task and was {before} before the first"
            raise ValueError(f"method {plan.method.name}, layer '{layer.name}': {what}")
        tensors[key] = value
    return tensors
