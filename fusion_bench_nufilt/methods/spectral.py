"""Spectral accumulation as a layer-wise method. It is this project's own and not the paper's."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from fusion_bench_nufilt.core import options
from fusion_bench_nufilt.core.dtypes import wide_dtype
from fusion_bench_nufilt.core.options import is_number
from fusion_bench_nufilt.core.voting import render, strengths, vote

from .base import LayerMethod, State

option = partial(options.option, panel="Method spectral")


@dataclass(frozen=True)
class SpectralConfig:
    """The settings of spectral accumulation.

    Raises:
        ValueError: a value is out of its range; the message names the key.
    """

    kappa: float = option(0.9, "Strength of a direction, over the tasks' mean largest singular value.", symbol="κ")
    damp: float = option(0.5, "How far directions that n tasks share are held down: by n^-damp.")
    ramp: float = option(
        0.0, "Makes κ grow with depth, from κ (1 - ramp) in the first block to κ (1 + ramp) in the last."
    )

    def __post_init__(self) -> None:
        for key in ("kappa", "damp"):
            if not (is_number(value := getattr(self, key)) and value > 0):
                raise ValueError(f"{key} must be a number > 0, got {value!r}")
        if not (is_number(self.ramp) and -1 < self.ramp < 1):
            raise ValueError(f"ramp must be a number between -1 and 1, got {self.ramp!r}")


class Spectral(LayerMethod):
    """Spectral accumulation, see :mod:`fusion_bench_nufilt.core.voting`.

    The state of a layer is the sum of the ``votes`` ``(d_o, d_i)`` of the ``count`` tasks that moved it, and the
    ``mean`` of their largest singular values. A single task is taken whole: until the second one arrives, ``votes`` is
    its update.
    """

    name = "spectral"
    label = "spectral accumulation"
    citation = "spectral accumulation, an unpublished method of fusion-bench-nufilt"
    Options = SpectralConfig
    targets = {"target_modules": "all-linear", "other_params": "mean"}  # noqa: RUF012
    itemsize = 8

    options: SpectralConfig

    def start(self, layer: str, theta_0: Tensor) -> State:
        return {
            "votes": torch.zeros_like(theta_0, dtype=wide_dtype(theta_0)),
            "mean": torch.tensor(0.0, dtype=torch.float64),
            "count": torch.tensor(0),
        }

    def add(self, layer: str, state: State, theta_0: Tensor, tau: Tensor) -> State:
        tau = tau.double()
        A, s_1 = vote(tau)
        if s_1 == 0:
            return state
        votes, count = state["votes"].double(), state["count"] + 1
        if count == 1:
            votes = tau
        elif count == 2:
            votes = vote(votes)[0] + A
        else:
            votes = votes + A
        mean = state["mean"] + (s_1 - state["mean"]) / count
        return {"votes": votes.to(state["votes"].dtype), "mean": mean, "count": count}

    def weight(self, layer: str, state: State, theta_0: Tensor) -> Tensor:
        X = state["votes"].double()
        if state["count"] > 1:
            X = render(X, state["mean"].item(), self._strengths[layer], self.options.damp)
        return (theta_0.double() + X).to(theta_0.dtype)

    @cached_property
    def _strengths(self) -> dict[str, float]:
        return strengths(self.layers, self.options.kappa, self.options.ramp)

    def flops(self, shape: tuple[int, ...], ranks: Sequence[int | None]) -> float:
        shorter, longer = sorted(shape)
        one_vote = 8 * longer * shorter**2  # two products in float64, whose operations count twice
        rendering = 8 * longer * shorter**2 + 24 * shorter**3
        return len(ranks) * one_vote + rendering
