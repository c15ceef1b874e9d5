r"""A task vector and its singular directions, for order-free methods that need more than its
entries.

Single precision has seven digits and a task vector's spectrum three or four decades, of which Gram
matrices and cubes make many more. The few leading directions are therefore taken out first, and
everything else is computed from what is left, :math:`\tau_r = \tau (I - V V^\top)`, whose rounding
errors are as small as its entries.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from fusion_bench_nufilt.nufilt.bases import leading_directions, top_eigenvectors
from fusion_bench_nufilt.nufilt.blocks import row_blocks
from fusion_bench_nufilt.nufilt.eigenvectors import gram_matrix
from fusion_bench_nufilt.nufilt.low_rank import LowRank
from fusion_bench_nufilt.nufilt.noise import Noise, above_noise, expected_noise
from fusion_bench_nufilt.nufilt.step import difference
from fusion_bench_nufilt.utils.tensors import (
    compute_dtype,
    select_rows,
    to_compute_dtype,
)

# Directions below this share of the strongest are rounding errors: 8 eps of float32.
RTOL = 1e-6
NUM_TAKEN_OUT = 16  # the leading directions that are taken out
# A task's vote is sought, and its rank is measured, in its share of a layer's directions if there
# were so many tasks.
MAX_TASKS = 8


class Directions(NamedTuple):
    """Singular values ``(n,)``, the largest first, between left ``(d_o, n)`` and right ``(d_i, n)``
    vectors.
    """

    left: Tensor
    values: Tensor
    right: Tensor


class TaskVector:
    r"""What a task changes in layers of one shape: :math:`\tau`, ``(n, d_o, d_i)``, or that of one
    of them, ``(d_o, d_i)``, of which alone there are directions and votes.

    It is given by the task's weights and the pretrained ones, ``base``, or by the factors of the
    updates; without a base, by itself, float32 at least. Thin factors are multiplied only where a
    method needs the matrix. What several methods need of a layer is computed once, and what takes
    a pass over the weights only where a method asks for it.

    Args:
        strength: that of the whole task, in all layers.
        rounding: what the rounding of stored values adds to it (:mod:`fusion_bench_nufilt.nufilt.
            noise`), and ``rounding_before`` what it has added to the update of the tasks before.
        shape: the layers', if the task vector is given in a basis.
    """

    def __init__(
        self,
        given: Tensor | LowRank,
        base: Tensor | None = None,
        *,
        strength: float = 1.0,
        rounding: float = 0.0,
        rounding_before: float = 0.0,
        shape: tuple[int, int] | None = None,
    ) -> None:
        self._given = given
        self._base = base
        self.strength = strength
        self.rounding = rounding
        self.rounding_before = rounding_before
        d_o, d_i = given.shape[-2:]
        self.shape = shape or (d_o, d_i)
        self.factors: LowRank | None = None
        # Thicker factors cost more to decompose than their product.
        if isinstance(given, LowRank) and 4 * given.rank <= min(d_o, d_i):
            self.factors = given
        self._leading: dict[int, Directions] = {}

    def rows(self, rows: Sequence[int]) -> "TaskVector":
        """Return the task vector of some layers of a stack."""
        return self._part(partial(select_rows, rows=rows), self.shape)

    def layer(self, row: int, shape: tuple[int, int]) -> "TaskVector":
        """Return the task vector of a layer of a stack, which has this shape."""
        return self._part(itemgetter(row), shape)

    def _part(self, part: Callable[[Tensor], Tensor], shape: tuple[int, int]) -> "TaskVector":
        given = self._given
        if isinstance(given, LowRank):
            given = LowRank(part(given.left), part(given.right))
        else:
            given = part(given)
        return TaskVector(
            given,
            None if self._base is None else part(self._base),
            strength=self.strength,
            rounding=self.rounding,
            rounding_before=self.rounding_before,
            shape=shape,
        )

    @cached_property
    def matrix(self) -> Tensor:
        r"""The matrix :math:`\tau`, in float32 at least."""
        if isinstance(self._given, LowRank):
            return self._given.product()
        if self._base is None:
            return self._given
        # Also of a task that is stored in more digits than the base.
        return difference(self._given, self._base, compute_dtype(self._base))

    @property
    def matrix_or_factors(self) -> Tensor | LowRank:
        """The factors, if it is given by them, in float32 at least, or the matrix."""
        if not isinstance(self._given, LowRank):
            return self.matrix
        wide = torch.promote_types(self._given.left.dtype, torch.float32)
        left, right = self._given.left.to(wide), self._given.right.to(wide)
        return LowRank(left.contiguous(), right.contiguous())

    def weights(self) -> Tensor:
        """Return the task's weights, with the bits that they are given by, if they are."""
        if isinstance(self._given, Tensor):
            return to_compute_dtype(self._given)
        assert self._base is not None
        return to_compute_dtype(self._base) + self.matrix

    @cached_property
    def noise(self) -> Noise | None:
        """What is expected of the errors in it; factors have none. What is no stronger is no
        direction of the task.
        """
        if self._base is None or isinstance(self._given, LowRank):
            return None
        # That of the task and of the pretrained model.
        return expected_noise(self._base, self.matrix, self.rounding)

    def before(self, update: Tensor) -> "TaskVector":
        """Return the update of the tasks before as a task vector."""
        assert self._base is not None
        earlier = TaskVector(update, shape=self.shape)
        earlier.noise = expected_noise(self._base, update, self.rounding_before)
        return earlier

    @cached_property
    def norm(self) -> Tensor:
        r"""The norm :math:`\lVert \tau \rVert`."""
        if isinstance(self._given, LowRank):
            return self._given.norm()
        return torch.linalg.vector_norm(self.matrix)

    @cached_property
    def energy(self) -> Tensor:
        r"""The squared norm :math:`\lVert \tau \rVert^2`, in float64."""
        if isinstance(self._given, LowRank):
            return self.norm.double() ** 2
        # Of all values at once, a norm in float32 has four digits, and rounding may have less.
        return torch.linalg.vector_norm(self.matrix, dim=-1).double().square().sum()

    @property
    def is_zero(self) -> bool:
        """Whether the task left the layer as it was."""
        if isinstance(self._given, LowRank):
            return not self.norm
        # As a rule, the first rows tell.
        blocks = row_blocks(self._given)
        return not any(bool(self._difference(rows).any()) for rows in blocks)

    def _difference(self, rows: slice) -> Tensor:
        assert isinstance(self._given, Tensor)
        assert self._base is not None
        return to_compute_dtype(self._given[rows]) - to_compute_dtype(self._base[rows])

    def add_to(self, total: Tensor) -> None:
        """Add the matrix to another in place, some rows after the others, of which none are kept;
        the norm is found on the way.
        """
        if isinstance(self._given, LowRank) or self._base is None:
            total.add_(self.matrix)
            return
        norms = []
        for rows in row_blocks(total):
            tau = self._difference(rows)
            total[rows].add_(tau)
            norms.append(torch.linalg.vector_norm(tau))
        self.norm = torch.linalg.vector_norm(torch.stack(norms))

    def directions(self, count: int) -> Directions:
        """Return the ``count`` leading directions, or as many as thin factors have, in float64.

        Those beyond the numerical rank are zero: their singular value is at most ``max(d_o, d_i) *
        eps`` times the largest, numpy's rule, and their vectors depend on the solver alone.
        """
        if self.factors is not None:
            U, s, V = _directions_of(self.factors)
            dtype = compute_dtype(self.factors.left)
            return self._of_rank(U[:, :count], s[:count], V[:, :count], dtype)
        tall = self._tall.double()
        V = torch.linalg.eigh(gram_matrix(tall)).eigenvectors.flip(-1)[:, :count]
        # The outputs of faint directions have rounding errors along those of strong ones.
        # Gram-Schmidt, from the strongest one on, takes them out.
        U, triangle = torch.linalg.qr(tall @ V)
        lengths = triangle.diagonal()
        U = U * lengths.sign()
        s = lengths.abs()
        dtype = self.matrix.dtype
        if self._is_wide:
            return self._of_rank(V, s, U, dtype)
        return self._of_rank(U, s, V, dtype)

    def leading(self, count: int) -> Directions:
        """Return about the same as :meth:`directions`, by two rounds of subspace iteration, whose
        price :func:`leading_directions` names. It is exact to rounding for a rank up to ``count``.
        """
        if count not in self._leading:
            self._leading[count] = self._iterate(count)
        return self._leading[count]

    def _iterate(self, count: int) -> Directions:
        basis_size = min(*self._given.shape, count + max(16, count // 8))
        # Iteration finds as few directions to rounding, so that a task is the same in either form.
        if self.factors is not None and self.factors.rank <= basis_size:
            return self.directions(count)
        U, V = leading_directions(self._tall, count, basis_size - count, rounds=2)
        s = torch.linalg.vector_norm(U, dim=0)
        U = U / s.clamp_min(torch.finfo(s.dtype).tiny)
        if self._is_wide:
            return self._of_rank(V, s, U, s.dtype)
        return self._of_rank(U, s, V, s.dtype)

    def _of_rank(self, U: Tensor, s: Tensor, V: Tensor, dtype: torch.dtype) -> Directions:
        exist = s > max(self.shape) * torch.finfo(dtype).eps * s[:1]
        if self.noise is not None:
            exist &= above_noise(s.square(), self.energy, self.noise, *self.shape)
        return Directions(U * exist, s * exist, V * exist)

    def vote(self) -> tuple[Tensor, Tensor]:
        r"""Return :math:`A = \tau \tau^\top \tau / s_1^3`, ``(d_o, d_i)``, and :math:`s_1`, both in
        float64.
        """
        if self.factors is not None:
            return _vote_of(_directions_of(self.factors))
        tall = self._tall
        count = min(NUM_TAKEN_OUT, tall.shape[1])
        V = torch.linalg.qr(top_eigenvectors(gram_matrix(tall), count)).Q
        squares, W = torch.linalg.eigh(gram_matrix((tall @ V).double()))
        V = V @ W.flip(-1).to(V)  # the leading directions, the strongest first
        s_1 = squares[-1].sqrt().to(V)
        if self._has_noisy_votes(RTOL, s_1):
            return _vote_of(self.directions(min(tall.shape)))
        rest = tall - tall @ V @ V.mT
        gram = gram_matrix(rest)
        left = tall @ (V / s_1)
        right = tall.mT @ (tall @ (V / s_1**2))
        # tau tau^T tau, since tau = tau V V^T + rest and rest V = 0. Each factor is divided by s_1
        # before they are multiplied, so that no product of float32 overflows.
        thin_left = torch.cat([left, rest @ (right / s_1)], dim=1).double()
        thin_right = torch.cat([right, V], dim=1).double()
        A = thin_left @ thin_right.mT + (rest / s_1) @ (gram / s_1**2)
        return self._as_given(A), s_1.double()

    def rough_vote(self, faintest: float) -> tuple[Tensor, Tensor]:
        """Return about the same as :meth:`vote`, if votes below ``faintest`` do not matter, with A
        in the dtype of the matrix.

        Single precision will do, and the leading directions, unless even the last of them counts.
        """
        directions = self.leading(max(1, min(self.shape) // MAX_TASKS))
        s = directions.values
        if s[-1] <= least_vote(faintest) * s[0]:
            return _vote_of(directions)
        if self.factors is not None:
            return self.vote()
        gram = gram_matrix(self._tall)
        if self._has_noisy_votes(faintest, s[0]):
            return self._vote_above_noise(gram)
        s_1 = torch.linalg.vector_norm(self._tall @ top_eigenvectors(gram, 1))
        A = (self._tall / s_1) @ (gram / s_1**2)
        return self._as_given(A), s_1.double()

    def _has_noisy_votes(self, faintest: float, s_1: Tensor) -> bool:
        """Tell whether noise may have votes that count, at the latest in the sum of many tasks."""
        if self.noise is None:
            return False
        edge = self.noise.strongest.sqrt()
        return bool(MAX_TASKS * edge**3 > faintest * s_1**3)

    def _vote_above_noise(self, gram: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vote of those directions of a matrix that are stronger than noise, given its
        Gram matrix.
        """
        assert self.noise is not None
        eigenvalues, V = torch.linalg.eigh(gram)
        squares = eigenvalues.clamp_min(0).flip(-1)
        count = int(above_noise(squares, self.energy, self.noise, *self.shape).sum())
        V = V.flip(-1)[:, :count]
        s_1 = squares[0].sqrt()
        A = (self._tall / s_1) @ (V * (squares[:count] / squares[0])) @ V.mT
        return self._as_given(A), s_1.double()

    @property
    def _is_wide(self) -> bool:
        d_o, d_i = self._given.shape
        return d_o < d_i

    @property
    def _tall(self) -> Tensor:
        """The matrix or its transpose, whichever is taller than wide."""
        return self._as_given(self.matrix)

    def _as_given(self, tall: Tensor) -> Tensor:
        """Return a matrix that is taller than wide in the orientation of the task vector."""
        if self._is_wide:
            return tall.mT
        return tall


def least_vote(faintest: float) -> float:
    """Return the singular value, relative to the strongest, below which votes do not matter."""
    # A vote is the cube of a singular value, and the last one may be found half as large as it is.
    return (faintest / 8) ** (1 / 3)


def _vote_of(directions: Directions) -> tuple[Tensor, Tensor]:
    U, s, V = directions
    return (U * (s / s[0]) ** 3) @ V.mT, s[0].double()


def _directions_of(factors: LowRank) -> Directions:
    """Return all directions of thin factors, in float64."""
    Q, left = torch.linalg.qr(factors.left.double())
    P, right = torch.linalg.qr(factors.right.mT.double())
    U, s, Vh = torch.linalg.svd(left @ right.mT)
    return Directions(Q @ U, s, P @ Vh.mT)
