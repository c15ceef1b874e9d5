r"""How strong a whole task should be in a merge: half of the strength for one of low rank, such as
an adapter.

Adapters want about half of the strength of full models (docs/notes/best.md). Whether a task is of
low rank is decided once for the model, by its *tail*: the share of its energy :math:`\lVert \tau
\rVert^2` outside the leading :math:`r` directions of every layer, where r is an eighth of the
smaller side of the model's layers (of their median). An adapter whose rank is at most r has no
tail; what full fine-tuning changes has one of several per cent. Up to a tail of 0.3 % a task has
half of the strength, from 1.5 % on it has all of it, and in between the strength grows evenly.

A model that was stored after its adapter was merged has rounding errors on top. Those of a weight
:math:`\theta` in a dtype with relative spacing :math:`\epsilon` have an expected energy, and no
direction of theirs is stronger than the edge of the spectrum of a random matrix of that energy.
So a direction leads only above that edge, and the tail and the whole are counted without the
energy of rounding. A layer in which rounding has more than an eighth of the energy says nothing,
and a task whose layers all say nothing has all of the strength.
"""

from collections.abc import Callable, Sequence
from math import log
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fusion_bench_nufilt.nufilt.step import LowRank
from fusion_bench_nufilt.nufilt.subspace import gram_matrix

from .task_vector import MAX_TASKS, TaskVector

# Tails between which the strength grows from a half to 1: those of adapters are below, those of
# full models above.
NO_TAIL = 0.003
FULL_TAIL = 0.015
MOST_ROUNDING = 1 / 8  # of a layer's energy; with more, its estimate is too inaccurate
SAMPLED_LAYERS = 16  # that a task changed

_L = TypeVar("_L")


class Spectrum(NamedTuple):
    """What a task changed in a layer."""

    shape: tuple[int, int]
    squares: Tensor  # squared singular values of the task vector, the largest first
    rounding: float  # the energy that rounding to the task's stored dtype is expected to have


def spectrum(tau: Tensor | LowRank, rounding: float) -> Spectrum:
    """Return the spectrum of a task vector ``(d_o, d_i)``."""
    task = TaskVector(tau)
    d_o, d_i = tau.shape
    if task.factors is not None:
        squares = task.directions(min(d_o, d_i)).values.double().square()
    else:
        tall = task.matrix.double()
        if d_o < d_i:
            tall = tall.mT
        squares = torch.linalg.eigvalsh(gram_matrix(tall)).flip(-1).clamp_min(0)
    return Spectrum((d_o, d_i), squares.cpu(), rounding)


def rounding_energy(theta: Tensor, spacing: float) -> float:
    r"""Return the expected energy of the rounding errors of a weight.

    ``spacing`` is that of stored values, relative to the power of two below each, so that the error
    of a value is spread evenly over one spacing. With magnitudes :math:`m\,2^e` whose logarithms
    are, too, the mean of :math:`m^{-2}` is :math:`3 / (8 \ln 2)`.
    """
    norm = torch.linalg.vector_norm(theta, dtype=torch.float64).item()
    return 3 / (8 * log(2)) / 12 * (spacing * norm) ** 2


def tail(spectra: Sequence[Spectrum], leading: int) -> float:
    """Return the share of a task's energy outside the ``leading`` directions of its layers."""
    outside = 0.0
    whole = 0.0
    for (d_o, d_i), squares, rounding in spectra:
        energy = squares.sum().item()
        # The largest squared singular value of a random matrix of this energy (Marchenko-Pastur).
        edge = rounding * (d_o**-0.5 + d_i**-0.5) ** 2
        leaders = squares[:leading]
        leaders = leaders[leaders > edge]
        # The leading directions also have their part of the rounding errors.
        rest = (1 - len(leaders) / d_o) * (1 - len(leaders) / d_i)
        outside += energy - leaders.sum().item() - rest * rounding
        whole += energy - rounding
    return outside / whole


def task_strength(
    layers: Sequence[_L],
    shapes: Sequence[tuple[int, int]],
    measure: Callable[[_L], Spectrum | None],
) -> float:
    """Return the strength of a task, between a half and 1.

    ``measure`` returns the spectrum of what the task changed in a layer, or None. The layers are
    taken from all over the model until enough of them were changed; ``shapes`` are those of all
    layers.
    """
    sides = sorted(min(shape) for shape in shapes)
    leading = max(1, sides[len(sides) // 2] // MAX_TASKS)
    spectra: list[Spectrum] = []
    # Steps of the golden ratio are far from the period at which kinds of layers return.
    scattered = sorted(range(len(layers)), key=lambda number: number * 0.618034 % 1)
    for number in scattered:
        layer_spectrum = measure(layers[number])
        if layer_spectrum is None:
            continue
        if layer_spectrum.rounding < MOST_ROUNDING * layer_spectrum.squares.sum():
            spectra.append(layer_spectrum)
        if len(spectra) == SAMPLED_LAYERS:
            break
    if not spectra:
        return 1.0
    growth = (tail(spectra, leading) - NO_TAIL) / (FULL_TAIL - NO_TAIL)
    return 0.5 + 0.5 * min(1.0, max(0.0, growth))
