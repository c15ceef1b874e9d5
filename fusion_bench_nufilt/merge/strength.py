"""The strength of a task, which is found from its whole model before any layer is merged.

It follows from the base and the task alone, so that it is the same in memory, from folders, in
mergekit, on a cluster, in a run that goes on, and for tasks that are merged one at a time.

Models are measured as they are given. Where a pool rounds a base in 32 bits and its tasks as it
loads them, a weight has the errors of both, which no value tells from those of one, as where the
base was published in 16 bits: an adapter that was merged there may count as a full model.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from fusion_bench_nufilt.methods.task_vector import Measure, Spectrum, task_strength
from fusion_bench_nufilt.models.layers import Layer
from fusion_bench_nufilt.models.model import ModelWeights
from fusion_bench_nufilt.nufilt.noise import ROUNDING_VARIANCE, rounding_of
from fusion_bench_nufilt.utils.devices import DevicePool, classify_error, map_layers
from fusion_bench_nufilt.utils.tensors import to_compute_dtype

from .engine import CPU
from .plan import Plan

Reserve = Callable[[Layer], AbstractContextManager[object]]
"""Waits for the memory that it takes to measure a layer, which is less than to merge it."""


def measure_strengths(
    plan: Plan,
    devices: Sequence[torch.device] = (CPU,),
    workers: int = 1,
    reserve: Reserve = nullcontext,
) -> list[float]:
    """Return the strengths of a plan's tasks, whose weights must be on this machine.

    So many workers measure a layer each at a time, on devices of one kind.
    """
    layers = plan.layers_of_model or plan.layers
    strengths = []
    for task in plan.tasks:
        strengths.append(strength_of(plan.pretrained, layers, task, devices, workers, reserve))
    return strengths


def strength_of(
    base: ModelWeights,
    layers: Sequence[Layer],
    task: ModelWeights,
    devices: Sequence[torch.device] = (CPU,),
    workers: int = 1,
    reserve: Reserve = nullcontext,
) -> float:
    """Return the strength of a task, given all layers to merge, between a half and 1; devices and
    workers are those of :func:`measure_strengths`.
    """
    shapes = [layer.view.shape for layer in layers]
    pool = DevicePool(devices)

    def measure(layer: Layer, by: Measure) -> Spectrum | None:
        if layer.param not in task.params:
            return None
        with reserve(layer), pool.free() as device:
            try:
                return _spectrum_of(base, task, layer, device, by)
            except RuntimeError as error:
                if device == CPU or classify_error(error) is None:
                    raise
            # Out of the clause, whose error holds the matrices.
            return _spectrum_of(base, task, layer, CPU, by)

    # Each on one thread, as layers are solved: an eigenvalue solver has other bits on several.
    measure_all = partial(map_layers, device=devices[0], workers=workers)
    return task_strength(layers, shapes, measure, measure_all)


@torch.no_grad()
def _spectrum_of(
    base: ModelWeights, task: ModelWeights, layer: Layer, device: torch.device, measure: Measure
) -> Spectrum:
    """Return the spectrum of what a task changed in a layer."""
    if task.rank_of(layer.param) is not None:
        factors = task.weight(layer.param, torch.empty(0, dtype=torch.float32, device=device))
        # Factors have not been rounded to the digits of a whole weight.
        return measure(factors, 0.0)
    theta_0 = base.source.read(layer.keys[0], device)
    new = task.weight(layer.param, theta_0)
    assert isinstance(new, Tensor)
    rounding = 0.0
    if layer.param in task.keys:
        of_values = rounding_of(new)
        stored = task.source.tensors[task.keys[layer.param]]
        if stored.is_quantised:
            of_values = max(of_values, ROUNDING_VARIANCE * stored.eps**2)
        rounding = of_values * to_compute_dtype(new).square().sum().item()
    tau = to_compute_dtype(new) - to_compute_dtype(theta_0)
    return measure(layer.view.matrix(tau), rounding)
