"""The bytes of merged layers in the result's files."""

from collections.abc import Callable, Mapping

from torch import Tensor

from fusion_bench_nufilt.methods import State
from fusion_bench_nufilt.models.architecture import Layer
from fusion_bench_nufilt.models.vocabulary import new_rows_key
from fusion_bench_nufilt.utils.tensors import FLOATS, TensorInfo, digest, is_finite, raw_bytes

from .engine import MergedLayer
from .plan import Plan
from .state_file import state_tensors


def serialize_layer(
    plan: Plan,
    state_places: Mapping[str, TensorInfo],
    merged: MergedLayer[Layer],
    weigh: Callable[[], Tensor],
) -> list[memoryview]:
    """Return the bytes of a layer's state, if it is kept, and of its weight; note their places in
    its record.

    ``state_places`` has the places in the file of the state, by key; none if there is no such file.
    """
    layer = merged.layer
    record = merged.record
    weight = plan.vocabulary.grown_layer(layer.param, weigh(), record["read"])
    stored: list[tuple[TensorInfo, Tensor]] = []
    if state_places:
        for key, value in state_to_keep(plan, layer, merged.state).items():
            if key in state_places:
                stored.append((state_places[key], value.cpu()))
    rows_place = state_places.get(new_rows_key(layer.param))
    if rows_place is not None:
        stored.append((rows_place, plan.vocabulary.new_rows(layer.param)))
    for key in layer.keys:
        place = plan.places[key]
        value = weight.to(FLOATS[place.dtype])
        # A weight that is finite in float32 may be infinite in float16, which the engine can't see.
        if not is_finite(value):
            raise ValueError(f"tensor '{key}': the merged weight is too large for {place.dtype}")
        stored.append((place, value.cpu()))
    written = []
    pieces = []
    for place, value in stored:
        # Of what is to be written: a run that goes on compares it with what is on the disk.
        written.append((place.file, place.start, place.stop, digest(value)))
        pieces.append(raw_bytes(value))
    record["written"] = written
    return pieces


def state_to_keep(plan: Plan, layer: Layer, state: State) -> dict[str, Tensor]:
    """Return the tensors of a layer's state by their keys in the file, whose shapes and dtypes they
    must have.
    """
    tensors = {}
    for name, (key, _, like) in state_tensors(plan, layer).items():
        value = state[name]
        if plan.method.is_stateless:
            value = layer.view.part(value).to(like.dtype)
        # The header of the file is made from the state that a method starts with: no other fits.
        if value.shape != like.shape or value.dtype != like.dtype:
            raise ValueError(
                f"method {plan.method.name}, layer '{layer.name}': '{name}' of its state is "
                f"{value.dtype} {tuple(value.shape)} after the last task and was "
                f"{like.dtype} {tuple(like.shape)} before the first"
            )
        tensors[key] = value
    return tensors
