r"""Spectral accumulation: what each task moves most, all of it at nearly the same strength. It is not the paper's.

The tasks of a layer vote, and the merged update is the sum of their votes with its spectrum made nearly flat:

.. math::
    A_t = U (s / s_1)^3 V^\top = \tau_t \tau_t^\top \tau_t / s_1^3 \quad (\tau_t = U s V^\top), \qquad
    S = \sum_t A_t = U_S\, \sigma\, V_S^\top, \qquad X = \kappa\, m\; U_S\, q(\sigma)\, V_S^\top

with m the mean of the tasks' :math:`s_1`. Cubing lets a task vote with its leading directions alone. A sum does not
depend on the order in which the tasks arrive, and so neither does X. Everything is computed in float64: q lifts votes
of :math:`10^{-6}` to full strength, and single precision cannot tell directions of nearly equal strength apart.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from fusion_bench_nufilt.core import options
from fusion_bench_nufilt.core.options import is_number
from fusion_bench_nufilt.core.subspace import gram_matrix, top_eigenvectors
from fusion_bench_nufilt.core.weights import wide_dtype

from .base import LayerMethod, State

SLOPE = 0.03  # the fall of q between no vote and one vote
FAINTEST = 1e-6  # a vote below this share of the largest is rounding

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
    """Spectral accumulation.

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
        if count == 2:  # the first task stood for itself
            votes = vote(votes)[0]
        votes = tau if count == 1 else votes + A
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


def vote(tau: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return :math:`A = \tau\tau^\top\tau / s_1^3`, ``(d_o, d_i)``, and :math:`s_1`; zeros for a zero update."""
    if tau.shape[0] < tau.shape[1]:
        A, s_1 = vote(tau.mT)
        return A.mT, s_1
    gram = gram_matrix(tau)
    s_1 = torch.linalg.vector_norm(tau @ top_eigenvectors(gram, 1))
    return (tau @ (gram / s_1**3) if s_1 > 0 else tau), s_1


def render(S: Tensor, mean: float, kappa: float, damp: float) -> Tensor:
    """Return the merged update X, ``(d_o, d_i)``, of the sum of the votes S, from the smaller Gram matrix of S."""
    if S.shape[0] < S.shape[1]:
        return render(S.mT, mean, kappa, damp).mT
    eigenvalues, V = torch.linalg.eigh(gram_matrix(S))
    sigma = eigenvalues.clamp_min(0).sqrt()
    gain = torch.where(sigma > 0, kappa * mean * flatten(sigma, damp) / sigma, 0)
    return S @ (V * gain @ V.mT)


def flatten(sigma: Tensor, damp: float) -> Tensor:
    """Return q, ``(k,)``: the strength of directions with ``sigma`` votes, which falls from 1 + SLOPE as they grow."""
    q = torch.where(sigma <= 1, 1 + SLOPE * (1 - sigma), sigma.clamp_min(1) ** -damp)
    return q.masked_fill(sigma < FAINTEST * sigma.amax(), 0)


def strengths(names: Sequence[str], kappa: float, ramp: float) -> dict[str, float]:
    r"""Return κ of each layer: :math:`\kappa\,(1 + \text{ramp}\,(2 l / (L - 1) - 1))` in block l of L blocks.

    The first number in a layer's name is the number of its block, and what stands before it tells stacks of blocks
    apart. A layer outside of all blocks has :math:`\kappa`.
    """
    blocks = {name: (found[1], int(found[2])) for name in names if (found := re.match(r"(.*?\.)??(\d+)\.", name))}
    last = dict(sorted(blocks.values(), key=lambda place: place[1]))  # the highest block of each stack
    kappas = dict.fromkeys(names, kappa)
    for name, (stack, block) in blocks.items():
        depth = 2 * block / last[stack] - 1 if last[stack] else 0
        kappas[name] = kappa * (1 + ramp * depth)
    return kappas
