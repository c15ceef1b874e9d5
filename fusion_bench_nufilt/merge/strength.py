"""The strength of a task, which is found from its whole model before any layer is merged.

It follows from the base and the task alone, so that it is the same in memory, from folders, in
mergekit, on a cluster, in a run that goes on, and for tasks that are merged one at a time.

Models are measured as they are given. Where a pool rounds a base in 32 bits and its tasks as it
loads them, a weight has the errors of both, which no value tells from those of one, as where the
base was published in 16 bits: an adapter that was merged there may count as a full model.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fusion_bench_nufilt.methods.task_vector import MAX_TASKS, TaskVector
from fusion_bench_nufilt.models.layers import Layer
from fusion_bench_nufilt.models.model import ModelWeights
from fusion_bench_nufilt.nufilt.eigenvectors import gram_matrix
from fusion_bench_nufilt.nufilt.low_rank import LowRank
from fusion_bench_nufilt.nufilt.noise import (
    ROUNDING_VARIANCE,
    Noise,
    above_noise,
    rounding_of,
    share_of_norm,
)
from fusion_bench_nufilt.utils.devices import DevicePool, classify_error, map_layers
from fusion_bench_nufilt.utils.tensors import to_compute_dtype

from .engine import CPU

# Tails between which the strength grows from a half to 1: those of adapters are below, those of
# full models above.
NO_TAIL = 0.003
FULL_TAIL = 0.015
MOST_ROUNDING = 1 / 8  # of a layer's energy; with more, its tail is less sure than other layers'
SAMPLED_LAYERS = 16  # that a task changed
MOST_LESS_SURE = 48  # that are measured in search of surer ones

_L = TypeVar("_L")

Reserve = Callable[[Layer], AbstractContextManager[object]]
"""Waits for the memory that it takes to measure a layer, which is less than to merge it."""


def strength_of(
    base: ModelWeights,
    layers: Sequence[Layer],
    task: ModelWeights,
    devices: Sequence[torch.device] = (CPU,),
    workers: int = 1,
    reserve: Reserve = nullcontext,
) -> float:
    """Return the strength of a task, whose weights must be on this machine, given all layers to
    merge, between a half and 1.

    So many workers measure a layer each at a time, on devices of one kind.
    """
    shapes = [layer.view.shape for layer in layers]
    pool = DevicePool(devices)

    def measure(layer: Layer) -> Spectrum | None:
        if task.entries[layer.param].rank == 0:
            return None
        with reserve(layer), pool.free() as device:
            try:
                return _spectrum_of(base, task, layer, device)
            except RuntimeError as error:
                if device == CPU or classify_error(error) is None:
                    raise
            # Out of the clause, whose error holds the matrices.
            return _spectrum_of(base, task, layer, CPU)

    def measure_all(sample: Sequence[Layer]) -> Iterable[Spectrum | None]:
        # Each on one thread, as they are solved: an eigenvalue solver has other bits on several.
        return map_layers(measure, sample, devices[0], workers)

    return task_strength(layers, shapes, measure_all)


@torch.no_grad()
def _spectrum_of(
    base: ModelWeights, task: ModelWeights, layer: Layer, device: torch.device
) -> "Spectrum":
    """Return the spectrum of what a task changed in a layer."""
    entry = task.entries[layer.param]
    if entry.rank is not None:
        factors = entry.read(torch.empty(0, dtype=torch.float32, device=device))
        # Factors have not been rounded to the digits of a whole weight.
        return spectrum(factors, 0.0)
    theta_0 = base.source.read(layer.keys[0], device)
    new = entry.read(theta_0)
    assert isinstance(new, Tensor)
    rounding = 0.0
    if entry.info is not None:
        rounding = rounding_of(new)
        if entry.info.is_quantised:
            rounding = max(rounding, ROUNDING_VARIANCE * entry.info.eps**2)
    tau = to_compute_dtype(new) - to_compute_dtype(theta_0)
    energy_of_rounding = rounding * to_compute_dtype(new).square().sum().item()
    return spectrum(layer.view.matrix(tau), energy_of_rounding)


class Spectrum(NamedTuple):
    """What a task changed in a layer."""

    shape: tuple[int, int]
    squares: Tensor  # squared singular values of the task vector, the largest first
    rounding: float  # the energy that rounding to the task's stored dtype is expected to have

    @property
    def energy(self) -> float:
        """The squared norm of the task vector."""
        return self.squares.sum().item()

    @property
    def whole(self) -> float:
        """The energy without that of rounding."""
        return self.energy - self.rounding

    def outside(self, num_leading: int) -> float:
        """Return the energy outside the leading directions, without that of rounding."""
        d_o, d_i = self.shape
        leading = self.squares[:num_leading]
        if self.rounding:
            leading = leading[self._counts()[:num_leading]]
        # The leading directions also have their part of the errors.
        share = (1 - len(leading) / d_o) * (1 - len(leading) / d_i)
        return self.energy - leading.sum().item() - share * self.rounding

    def _counts(self) -> Tensor:
        """Tell which directions are stronger than rounding, taken for as large in all rows.

        Where it is not, its strongest direction is stronger, but the rest is not: with the edge of
        uneven rows, steep spectra would lose leading directions to the tail.
        """
        device = self.squares.device
        energy = torch.tensor(self.rounding, dtype=torch.float64, device=device)
        d_o, d_i = self.shape
        rows = torch.ones(d_o, dtype=torch.float64, device=device)
        columns = torch.ones(d_i, dtype=torch.float64, device=device)
        noise = Noise(energy, energy * share_of_norm(rows, columns))
        return above_noise(self.squares, self.squares.sum(), noise, d_o, d_i)


def task_strength(
    layers: Sequence[_L],
    shapes: Sequence[tuple[int, int]],
    measure: Callable[[Sequence[_L]], Iterable[Spectrum | None]],
) -> float:
    r"""Return the strength of a task, between a half and 1: half of the strength for one of low
    rank, such as an adapter.

    Adapters want about half of the strength of full models (docs/notes/best.md). Whether a task is
    of low rank is decided once for the model, by its *tail*: the share of its energy :math:`\lVert
    \tau \rVert^2` outside the leading :math:`r` directions of every layer, where r is an eighth of
    the smaller side of the model's layers (of their median). An adapter whose rank is at most r has
    no tail; what full fine-tuning changes has one of several per cent. Up to a tail of 0.3 % a task
    has half of the strength, from 1.5 % on it has all of it, and in between the strength grows
    evenly.

    A model that was stored after its adapter was merged has rounding errors on top. So a direction
    leads only if it is stronger than these (:func:`.above_noise`), and the tail and the whole are
    counted without their energy. Layers in which rounding has more than an eighth of the energy
    count where there are no others alone, and if it has all of it, the task has all of the
    strength.

    ``measure`` returns what the task changed in each of some layers, or None. These are taken from
    all over the model until enough of them were changed; ``shapes`` are those of all layers.
    """
    sides = sorted(min(shape) for shape in shapes)
    num_leading = max(1, sides[len(sides) // 2] // MAX_TASKS)
    sure: list[Spectrum] = []
    less_sure: list[Spectrum] = []
    hidden = 0  # layers in which rounding has all of the energy
    # Steps of the golden ratio are far from the period at which kinds of layers return.
    scattered = deque(sorted(range(len(layers)), key=lambda number: number * 0.618034 % 1))
    while scattered and len(sure) < SAMPLED_LAYERS and len(less_sure) + hidden < MOST_LESS_SURE:
        # No more than are needed, though some of them may not count.
        count = min(len(scattered), SAMPLED_LAYERS - len(sure))
        sample = [layers[scattered.popleft()] for _ in range(count)]
        for found in measure(sample):
            if found is None or found.energy == 0:
                continue
            if found.rounding < MOST_ROUNDING * found.energy:
                sure.append(found)
            elif found.rounding < found.energy:
                less_sure.append(found)
            else:
                hidden += 1
    sampled = sure or less_sure[:SAMPLED_LAYERS]
    if not sampled:
        return 1.0
    growth = (tail(sampled, num_leading) - NO_TAIL) / (FULL_TAIL - NO_TAIL)
    return 0.5 + 0.5 * min(1.0, max(0.0, growth))


def tail(spectra: Sequence[Spectrum], num_leading: int) -> float:
    """Return the share of a task's energy outside the leading directions of its layers."""
    outside = 0.0
    whole = 0.0
    for layer_spectrum in spectra:
        outside += layer_spectrum.outside(num_leading)
        whole += layer_spectrum.whole
    return outside / whole


def spectrum(tau: Tensor | LowRank, rounding: float) -> Spectrum:
    """Return the spectrum of a task vector ``(d_o, d_i)``."""
    d_o, d_i = tau.shape
    task = TaskVector(tau)
    if task.factors is not None:
        squares = task.directions(task.factors.rank).values.square()
    else:
        tall = task.matrix.mT if d_o < d_i else task.matrix
        # Two decades below the tails that count, float32 is off.
        squares = torch.linalg.eigvalsh(gram_matrix(tall)).double().flip(-1).clamp_min(0)
    return Spectrum((d_o, d_i), squares.cpu(), rounding)
