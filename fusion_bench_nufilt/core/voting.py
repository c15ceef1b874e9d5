r"""The running sum of spectral accumulation: what each task moves most, all of it at nearly the same strength.

The tasks of a layer vote, and the merged update is the sum of their votes with its spectrum made nearly flat:

.. math::
    A_t = U (s / s_1)^3 V^\top = \tau_t \tau_t^\top \tau_t / s_1^3 \quad (\tau_t = U s V^\top), \qquad
    S = \sum_t A_t = U_S\, \sigma\, V_S^\top, \qquad X = \kappa\, m\; U_S\, q(\sigma)\, V_S^\top

with m the mean of the tasks' :math:`s_1`. Cubing lets a task vote with its leading directions alone. A sum does not
depend on the order in which the tasks arrive, and so neither does X. Everything is computed in float64: q lifts votes
of :math:`10^{-6}` to full strength, and single precision cannot tell directions of nearly equal strength apart. The
method is this project's own and not the paper's.
"""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .subspace import gram_matrix, top_eigenvectors

SLOPE = 0.03  # the fall of q between no vote and one vote
FAINTEST = 1e-6  # a vote below this share of the largest is rounding


def vote(tau: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return :math:`A = \tau\tau^\top\tau / s_1^3`, ``(d_o, d_i)``, and :math:`s_1`; zeros for a zero update."""
    if tau.shape[0] < tau.shape[1]:
        A, s_1 = vote(tau.mT)
        return A.mT, s_1
    gram = gram_matrix(tau)
    s_1 = torch.linalg.vector_norm(tau @ top_eigenvectors(gram, 1))
    return (tau @ (gram / s_1**3) if s_1 > 0 else tau), s_1


def render(S: Tensor, mean: float, kappa: float, damp: float) -> Tensor:
    r"""Return the merged update :math:`X = \kappa\, m\; U_S\, q(\sigma)\, V_S^\top`, ``(d_o, d_i)``.

    Args:
        S: the sum of the votes, ``(d_o, d_i)``, float64.
        mean: m, the mean of the tasks' largest singular values.
        kappa: the strength of a direction over m, see :func:`strengths`.
        damp: see :func:`flatten`.
    """
    return map_spectrum(S, lambda sigma: kappa * mean * flatten(sigma, damp))


def flatten(sigma: Tensor, damp: float) -> Tensor:
    """Return q, ``(k,)``: the strength of directions with ``sigma`` votes, which falls from 1 + SLOPE as they grow."""
    q = torch.where(sigma <= 1, 1 + SLOPE * (1 - sigma), sigma.clamp_min(1) ** -damp)
    return q.masked_fill(sigma < FAINTEST * sigma.amax(), 0)


def map_spectrum(X: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    r"""Return :math:`U f(s) V^\top` for :math:`X = U s V^\top`, ``(d_o, d_i)``, from the smaller Gram matrix."""
    if X.shape[0] < X.shape[1]:
        return map_spectrum(X.mT, f).mT
    s2, V = torch.linalg.eigh(gram_matrix(X))
    s = s2.clamp_min(0).sqrt()
    gain = torch.where(s > 0, f(s) / s, 0)
    return X @ (V * gain @ V.mT)


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
