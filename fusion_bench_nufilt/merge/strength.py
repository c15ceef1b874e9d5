"""The strength of a merge whose method finds it once all layers are merged."""

import logging

import torch
from torch import Tensor

from fusion_bench_nufilt.core.weights import widened
from fusion_bench_nufilt.methods.strength import Measure, Strength, find_strength

from .architecture import Layer
from .plan import Plan

log = logging.getLogger(__name__)


def merged_weight(plan: Plan, layer: Layer, update: Tensor, scale: float) -> Tensor:
    """Return the weight of a layer, as the base stores it, from its update of strength 1."""
    weight, _ = plan.base.read(key := layer.keys[0], torch.device("cpu"))
    weight = weight.to(plan.dtype(key))
    return (widened(weight) + scale * update.to(weight.device)).to(weight.dtype)


def strength_of(measures: list[Measure]) -> Strength:
    """Return the strength of a merge of these layers, and log it."""
    found = find_strength(measures)
    log.info("strength %(scale).3g: at 1, tasks keep %(kept).2f of themselves, and layers move by %(moved).2g", found)
    return found
