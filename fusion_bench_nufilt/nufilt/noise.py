r"""What the rounding of stored weights adds to a task vector, and which of its
directions are stronger. None of this is the paper's, whose models are in 32 bits.

A weight in 16 bits is known to a relative error. In the difference of two models these
errors are noise of full rank, whose directions are none of the task's. The energy of
the noise in a layer follows from one number, its *rounding*: the mean squared error of
stored values over their mean square.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import row_blocks

#: The rounding of values with a spacing of 1 relative to the power of two below each:
#: an error is spread evenly over one spacing, and with magnitudes m 2^e whose
#: logarithms are, too, the mean of m^-2 is 3 / (8 ln 2).
ROUNDING_VARIANCE = 3 / (8 * math.log(2)) / 12
# A direction is stronger than noise if it is by this much: the edge of a finite matrix
# and the estimate of its energy are a few per cent off.
_MARGIN = 1.1
_TINY = torch.finfo(torch.float64).tiny  # for 0 / 0


class Noise(NamedTuple):
    """What is expected of the errors in a task vector."""

    energy: Tensor  # their squared norm, (...)
    strongest: Tensor  # the energy of their strongest direction, (...)


def rounding_of(values: Tensor) -> float:
    """Return the rounding of stored values: that of the 16-bit dtype of the fewest
    digits that has them all, since wider ones may have been rounded before; 0 if none
    has.
    """
    for dtype in (torch.bfloat16, torch.float16):
        is_coarser = torch.finfo(dtype).eps > torch.finfo(values.dtype).eps
        if values.dtype == dtype or (is_coarser and _is_held(values, dtype)):
            return ROUNDING_VARIANCE * torch.finfo(dtype).eps ** 2
    return 0.0


def _is_held(values: Tensor, dtype: torch.dtype) -> bool:
    for part in (values[:1], values):  # the first row tells as a rule
        if not torch.equal(part.to(dtype).to(values.dtype), part):
            return False
    return bool(values.any())  # zeros tell nothing


def summed_rounding(before: float, rounding: float) -> float:
    r"""Return the rounding of the update of several tasks, the last of which adds its
    own to that of the others.

    Half of a task vector's rounding is the task's, and half the pretrained model's,
    whose errors are in all of them alike: n tasks of 2 r have :math:`(n + n^2)\, r`,
    which one number tells if the earlier ones are taken for as many such tasks as have
    it.
    """
    return before + rounding / 2 + math.sqrt(rounding**2 / 4 + 2 * before * rounding)


def expected_noise(theta_0: Tensor, tau: Tensor, rounding: float) -> Noise | None:
    r"""Return what is expected of the errors in the difference ``tau`` of stored
    weights and ``theta_0``, ``(..., d_o, d_i)``, in float64; None where there are none.

    ``rounding`` is that of all weights that were rounded, summed. No row or column has
    more energy of errors than there is: those that are as they were have none.
    """
    if not rounding:
        return None
    of_rows = []
    of_columns = tau.new_zeros(2, *tau[..., 0, :].shape, dtype=torch.float64)
    for rows in row_blocks(tau):
        changes = tau[..., rows, :].square()
        weights = (theta_0[..., rows, :] + tau[..., rows, :]).square_()
        of_columns += torch.stack([weights.sum(dim=-2), changes.sum(dim=-2)])
        sums = weights.sum(dim=-1), changes.sum(dim=-1), weights.amax(dim=-1)
        of_rows.append(torch.stack(sums).double())
    weights, changes, largest = torch.cat(of_rows, dim=-1)
    r = torch.minimum(rounding * weights, changes)
    c = torch.minimum(rounding * of_columns[0], of_columns[1])
    energy = torch.minimum(r.sum(dim=-1), c.sum(dim=-1))
    # A value that is much larger than all others is less even than its row and column.
    lone = torch.minimum(4 * rounding * largest, changes).amax(dim=-1)
    return Noise(energy, lone.maximum(energy * share_of_norm(r, c)))


def share_of_norm(r: Tensor, c: Tensor) -> Tensor:
    r"""Return the squared norm of large random matrices over their energy, ``(...)``,
    given the expected energies of their rows and columns.

    With independent entries, whose energy is :math:`r_i c_j` where those of all rows
    and columns are 1, it is the least :math:`t\,h(r)\,h(c)` of all t, where
    :math:`\sum_i r_i / (h(r) - r_i) = t` (Lehner, 1999; Bandeira, Boedihardjo and van
    Handel, 2023): Marchenko and Pastur's edge if they are even.
    """
    # Powers of two, of which the best is within 3 % of the least.
    count = max(r.shape[-1], c.shape[-1]).bit_length() + 1
    t = torch.arange(count, dtype=r.dtype, device=r.device).exp2()
    return (t * _heights(r, t) * _heights(c, t)).amin(dim=-1)


def _heights(r: Tensor, t: Tensor) -> Tensor:
    """Return h(r) of :func:`share_of_norm` for each t, ``(..., k)``."""
    r = (r / r.sum(dim=-1, keepdim=True).clamp_min(_TINY))[..., None, :]
    # That of the largest entry alone, from where Newton's method for 1 / t rises to h.
    h = (r.amax(dim=-1) * (1 + 1 / t)).clamp_min(_TINY)
    for _ in range(12):
        parts = r / (h[..., None] - r)
        s, squares = parts.sum(dim=-1), parts.square().sum(dim=-1)
        h = h * (1 + (s / t - 1) * s / (s + squares).clamp_min(_TINY))
    return h


def above_noise(
    squares: Tensor, energy: Tensor, noise: Noise, d_o: int, d_i: int
) -> Tensor:
    """Tell which directions of matrices ``(d_o, d_i)`` count: those that are stronger
    than any of the noise, and weaker ones as long as more of what is left is the task's
    than noise's, as in a full model with uneven rows.

    The energy of these errors is at most what is expected, and at most what is left
    without the directions that are stronger: a matrix of exactly low rank has none.

    Args:
        squares: the largest squared singular values ``(..., k)``, the largest first.
        energy: the sum of all of them, ``(...)``.
        noise: what is expected of the errors, ``(...)``.

    Returns:
        ``(..., k)``, of which the first is true wherever there is any energy.
    """
    squares, energy = squares.double(), energy.double()
    unknown = 16 * torch.finfo(torch.float32).eps * energy  # what sums may miss
    most = torch.minimum(noise.energy, energy)
    count = torch.zeros_like(most)
    while True:
        edge = _MARGIN**2 * noise.strongest * most / noise.energy.clamp_min(_TINY)
        stronger = squares > edge[..., None]
        stronger[..., 0] = squares[..., 0] > 0
        count_before, count = count, stronger.sum(dim=-1).to(most)
        if torch.equal(count, count_before):
            break
        rest = energy - (squares * stronger).sum(dim=-1)
        # The stronger directions also have their part of the errors.
        share = ((1 - count / d_o) * (1 - count / d_i)).clamp_min(1 / (d_o * d_i))
        most = torch.minimum(most, rest.maximum(unknown) / share)
    before = torch.ones_like(squares).cumsum(dim=-1) - 1
    left = energy[..., None] - squares.cumsum(dim=-1) + squares
    share = (1 - before / d_o) * (1 - before / d_i)
    is_task = left - unknown[..., None] > 2 * share * noise.energy[..., None]
    return stronger | (is_task & (squares > 0))
