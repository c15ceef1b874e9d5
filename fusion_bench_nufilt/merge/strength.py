"""The strength of a merge whose method finds it once all layers are merged."""

import logging
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from fusion_bench_nufilt.core.weights import widened
from fusion_bench_nufilt.core.workers import map_layers
from fusion_bench_nufilt.methods.strength import Measure, Strength, find_strength, in_words
from fusion_bench_nufilt.storage.tensors import TensorFile

from .architecture import Layer
from .beside import UPDATES
from .encode import note_written, stored_weight
from .output import Output, Record
from .plan import Plan

log = logging.getLogger(__name__)
_CPU = torch.device("cpu")


def strength_of(measures: Collection[Measure]) -> Strength:
    """Return the strength of a merge of these layers, and log it."""
    found = find_strength(measures)
    log.info("strength %s", in_words(found))
    return found


def merged_weight(plan: Plan, layer: Layer, update: Tensor, scale: float) -> Tensor:
    """Return the weight of a layer, as the base stores it, from its update of strength 1."""
    weight, _ = plan.base.read(key := layer.keys[0], _CPU)
    weight = weight.to(plan.dtype(key))
    return (widened(weight) + scale * update.cpu()).to(weight.dtype)


def measures_of(plan: Plan, done: Mapping[str, Record]) -> list[Measure]:
    """Return the measures of all layers, in the order of the plan."""
    return [done[layer.param]["measure"] for layer in plan.layers]


def write_weights(plan: Plan, output: Output) -> None:
    """Write the weights of the layers whose updates are written, and remove those."""
    scale = strength_of(measures_of(plan, output.done))["scale"]
    updates = TensorFile(output.model / UPDATES)

    def write(layer: Layer) -> None:
        before = output.done[layer.param]
        kept = [piece for piece in before["written"] if piece[0] != UPDATES]
        weight = merged_weight(plan, layer, updates.read(updates.tensors[layer.name]), scale)
        new = Record(**{**before, "read": dict(before["read"]), "written": []})
        pieces = note_written(new, stored_weight(plan, layer, weight, new))
        for (file, start, _, _), data in zip(new["written"], pieces, strict=True):
            output.write(file, data, start)
        output.record(Record(**{**new, "written": kept + new["written"]}))

    left = [layer for layer in plan.layers if any(piece[0] == UPDATES for piece in output.done[layer.param]["written"])]
    for _ in map_layers(write, left, _CPU):
        pass
    output.drop(UPDATES)
