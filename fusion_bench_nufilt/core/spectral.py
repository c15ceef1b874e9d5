r"""Spectral accumulation: what each task moves most, all of it at nearly the same strength. Ours, not the paper's.

The tasks of a layer vote, and the merged update is the sum of their votes with its spectrum made nearly flat:

.. math::
    A_t = U (s / s_1)^3 V^\top = \tau_t \tau_t^\top \tau_t / s_1^3 \quad (\tau_t = U s V^\top), \qquad
    S = \sum_t A_t = U_S\, \sigma\, V_S^\top, \qquad X = \kappa\, m\; U_S\, q(\sigma)\, V_S^\top

with m the mean of the tasks' :math:`s_1`. Cubing lets a task vote with its leading directions alone. A sum does not
depend on the order of arrival, and neither does X. As q falls strictly, S need not be kept: given m, it is read back
from the merged weights :math:`\theta_0 + X`. Everything is computed in float64: q lifts votes of :math:`10^{-6}` to
full strength, and what is nearly flat has no singular vectors that single precision could tell apart.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from . import options
from .checks import Layers, TaskLayers, check_device, check_layers
from .low_rank import LowRank
from .options import is_number
from .subspace import gram_matrix, top_eigenvectors
from .workers import map_layers

option = partial(options.option, panel="Method spectral")

SLOPE = 0.03  # of q below one vote: what makes it invertible there
FAINTEST = 1e-6  # vote over the largest; what is below is rounding
LOST = 1e-3  # strength in the merged weights; what is below was never lifted


@dataclass(frozen=True)
class SpectralConfig:
    """The settings of spectral accumulation.

    Raises:
        ValueError: a value out of its range; the message names the key.
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


@dataclass(frozen=True)
class Votes:
    """What must be known of the tasks in a merged layer, beside its weight."""

    mean: float = 0.0  # m, of their largest singular values
    count: int = 0  # how many of them moved the layer


@dataclass(frozen=True)
class SpectralReport:
    """What happened to one layer."""

    shape: tuple[int, ...]  # (d_o, d_i)
    seconds: float
    task_norm: float  # Frobenius norm of the new task vector
    merged_norm: float  # Frobenius norm of the cumulative update after this step
    mean: float  # of the votes after this step
    count: int


def accumulate_each(
    pretrained: Layers,
    merged: Layers,
    task: TaskLayers,
    votes: Mapping[str, Votes],
    kappas: Mapping[str, float],
    damp: float,
    *,
    device: torch.device | str | None = None,
) -> Iterator[tuple[str, Tensor, SpectralReport]]:
    """:func:`accumulate_layer` for many layers, side by side; yields name, new weight and report of each.

    Raises:
        ValueError: the three models do not fit or hold non-finite values, or what :func:`accumulate_layer` refuses;
            names the layer.
    """
    check_layers(pretrained, pretrained, model="pretrained")
    check_layers(pretrained, merged, model="merged")
    check_layers(pretrained, task, model="task")
    where = check_device(device or next((weight.device for weight in merged.values()), "cpu"))

    @torch.no_grad()
    def solve(name: str) -> tuple[str, Tensor, SpectralReport]:
        theta_0, theta, theta_t = pretrained[name].to(where), merged[name].to(where), task[name].to(where)
        try:
            weight, report = accumulate_layer(theta_0, theta, theta_t, votes[name], kappas[name], damp)
        except ValueError as error:
            raise ValueError(f"layer '{name}': {error}") from error
        return name, weight.to(merged[name].device), report

    yield from map_layers(solve, list(merged), where)


def accumulate_layer(
    theta_0: Tensor, theta: Tensor, task: Tensor | LowRank, votes: Votes, kappa: float, damp: float
) -> tuple[Tensor, SpectralReport]:
    r"""Merge one more task into a layer: :math:`\theta_0 + X`.

    Args:
        theta_0: pretrained weight, ``(d_o, d_i)``.
        theta: merged weight so far, float32 or float64; ``theta_0`` before the first task.
        task: weight of the new model, or the factors of its update.
        votes: of the tasks in ``theta``.
        kappa: strength in this layer, see :func:`strengths`.
        damp: see :func:`flatten`.

    Returns:
        The new weight, in the dtype of ``theta``, and a report, which has the new votes. The first task is taken
        whole; one that does not move the layer changes nothing.

    Raises:
        ValueError: ``theta`` is narrower than float32, or was not made by these votes.
    """
    if theta.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"votes can't be read back from {theta.dtype} weights, which are too coarse: use float32")
    start = time.perf_counter()
    dtype, theta_0 = theta.dtype, theta_0.double()
    tau = task.product().double() if isinstance(task, LowRank) else task.double() - theta_0
    X = theta.double() - theta_0
    S, s_1 = vote(tau)
    if s_1 > 0:
        mean = votes.mean + (s_1.item() - votes.mean) / (votes.count + 1)
        if votes.count == 0:
            X = tau
        else:
            S += vote(X)[0] if votes.count == 1 else read_votes(X, kappa * votes.mean, damp)
            X = map_spectrum(S, lambda sigma: kappa * mean * flatten(sigma, damp))
        votes = Votes(mean, votes.count + 1)
    seconds = time.perf_counter() - start
    report = SpectralReport(tuple(X.shape), seconds, tau.norm().item(), X.norm().item(), votes.mean, votes.count)
    return (theta_0 + X).to(dtype), report


def vote(tau: Tensor) -> tuple[Tensor, Tensor]:
    r""":math:`A = \tau\tau^\top\tau / s_1^3`, ``(d_o, d_i)``, and :math:`s_1`; zeros for a task that moves nothing."""
    if tau.shape[0] < tau.shape[1]:
        A, s_1 = vote(tau.mT)
        return A.mT, s_1
    gram = gram_matrix(tau)
    s_1 = torch.linalg.vector_norm(tau @ top_eigenvectors(gram, 1))
    return (tau @ (gram / s_1**3) if s_1 > 0 else tau), s_1


def read_votes(X: Tensor, strength: float, damp: float) -> Tensor:
    r"""The sum S of the votes that made :math:`X = \kappa m\, U_S\, q(\sigma)\, V_S^\top`, ``(d_o, d_i)``.

    Args:
        X: merged update, ``(d_o, d_i)``.
        strength: :math:`\kappa m`.
        damp: see :func:`flatten`.

    Raises:
        ValueError: X is larger than any votes make it.
    """

    def inverse(s: Tensor) -> Tensor:
        q = s / strength
        if q.amax() > 1 + 2 * SLOPE:
            raise ValueError("the merged weight is not what its recorded votes made: was it changed since?")
        sigma = torch.where(q >= 1, 1 - (q - 1) / SLOPE, q.clamp(LOST, 1) ** (-1 / damp))
        return sigma.clamp_min(0).masked_fill(q < LOST, 0)

    return map_spectrum(X, inverse)


def flatten(sigma: Tensor, damp: float) -> Tensor:
    """q: the strength of directions with ``sigma`` votes, ``(k,)``, all nearly 1; it falls from 1 + SLOPE."""
    q = torch.where(sigma <= 1, 1 + SLOPE * (1 - sigma), sigma.clamp_min(1) ** -damp)
    return q.masked_fill(sigma < FAINTEST * sigma.amax(), 0)


def map_spectrum(X: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    r""":math:`U f(s) V^\top` of :math:`X = U s V^\top`, ``(d_o, d_i)``, from the smaller Gram matrix."""
    if X.shape[0] < X.shape[1]:
        return map_spectrum(X.mT, f).mT
    s2, V = torch.linalg.eigh(gram_matrix(X))
    s = s2.clamp_min(0).sqrt()
    gain = torch.where(s > 0, f(s) / s, 0)
    return X @ (V * gain @ V.mT)


def strengths(names: Sequence[str], config: SpectralConfig) -> dict[str, float]:
    r"""κ of each layer: :math:`\kappa\,(1 + \text{ramp}\,(2 l / (L - 1) - 1))` in block l of L, else :math:`\kappa`.

    The first number in a layer's name is its block's; what stands before it tells stacks of blocks apart.
    """
    blocks = {name: (found[1], int(found[2])) for name in names if (found := re.match(r"(.*?\.)??(\d+)\.", name))}
    last = dict(sorted(blocks.values(), key=lambda at: at[1]))  # of each stack its highest block
    kappas = dict.fromkeys(names, config.kappa)
    for name, (stack, block) in blocks.items():
        depth = 2 * block / last[stack] - 1 if last[stack] else 0
        kappas[name] = config.kappa * (1 + config.ramp * depth)
    return kappas
