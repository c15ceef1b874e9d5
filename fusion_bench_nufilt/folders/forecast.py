"""How long a merge will take: what its layers cost, at the rate at which this machine works off a sample."""

import hashlib
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from fusion_bench_nufilt.core import FusionConfig
from fusion_bench_nufilt.core.workers import map_layers

if TYPE_CHECKING:
    from .methods import Method

T = TypeVar("T")

_WIDTH = 1024  # of the sample: where the rate is about that of layers of any size


def predict_seconds(
    layers: Iterable[tuple[tuple[int, ...], int | None]], nbytes: int, method: "Method", workers: int
) -> float:
    """Rough time on this CPU, as it is now.

    Args:
        layers: shape ``(d_o, d_i)`` of every layer once for each of its steps, and the rank of a step's LoRA or None.
        nbytes: what is read and written, each byte of which goes through a digest.
        method: how layers are merged.
        workers: how many layers are worked on at a time.
    """
    flops = sum(method.flops(shape, rank) for shape, rank in layers)
    per_flop, per_byte = _rates(method, workers)
    return flops * per_flop + nbytes * per_byte


def layer_flops(shape: tuple[int, ...], rank: int | None, config: FusionConfig) -> float:
    """Floating-point operations of a step on a layer, eigenvalue solvers in products of the same duration."""
    d_o, d_i = shape
    ranks = config.ranks(d_i)
    outputs, small = min(rank or d_o, d_o, d_i) if rank else d_o, min(d_o, d_i)  # tau has as many rows as its LoRA
    r_p, block = min(ranks.null, small), 2 * ranks.null + 16
    with_gram = d_i <= 2 * outputs
    flops = outputs * d_i**2 if with_gram else 0
    flops += d_o * d_i * small  # Gram matrix of what is merged; V_p by block iteration or by a full solver
    flops += 12 * small * block * (2 * small + 4 * block) if small >= max(256, 16 * r_p) else 10 * small**3
    flops += 4 * d_o * d_i * (r_p + 16) + 4 * outputs * d_i * r_p + 4 * outputs * d_i * ranks.lora
    height = d_i if with_gram else 2 * outputs
    steps = config.max_steps if config.solver == "adam" else 2
    return flops + steps * 2 * d_i * ranks.lora * (height + 2 * (r_p + ranks.task) + 2 * ranks.lora)


def spectral_flops(shape: tuple[int, ...]) -> float:
    """The same of spectral accumulation: a vote, and two spectra mapped. Those in float64 count twice."""
    short, long = sorted(shape)
    return 2 * (9 * long * short**2 + 24 * short**3)


def _rates(method: "Method", workers: int) -> tuple[float, float]:
    """Seconds for each operation and each byte, of a layer and a digest for each worker at a time."""

    def merge(layer: tuple[Tensor, Tensor, Tensor]) -> None:
        method.work_off(*layer)

    def seconds(work: Callable[[T], object], what: T) -> float:
        begin = time.perf_counter()
        list(map_layers(work, [what] * workers, torch.device("cpu"), workers))
        return (time.perf_counter() - begin) / workers

    seconds(merge, _sample(64))  # first calls are slow
    per_flop = seconds(merge, _sample(_WIDTH)) / method.flops((_WIDTH, _WIDTH), None)
    return per_flop, seconds(hashlib.sha256, bytes(2**24)) / 2**24


def _sample(width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Base, merged and task weight whose differences have the spectrum of task vectors."""
    random = torch.Generator().manual_seed(0)
    decay = torch.arange(1, width + 1.0) ** -0.7
    theta_0, tau, tau_t = (torch.randn(width, width, generator=random) for _ in range(3))
    return theta_0, theta_0 + tau * decay, theta_0 + tau_t * decay
