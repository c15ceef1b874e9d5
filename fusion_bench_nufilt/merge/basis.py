r"""Layers whose tasks are all given as factors, in an orthonormal basis of these.

The merged update of tasks :math:`L_t R_t` has its columns in the span of all :math:`L_t`, and an
isometry of the outputs changes no method that says so (``sides_in_basis``). With an orthonormal
basis Q of that span, the layer ``(d_o, d_i)`` becomes one of as many outputs as the tasks have
directions, on a base of zeros, and its update is Q times the merged one; likewise with a basis P of
the inputs. So nothing but the last product, if that is wanted, has the size of the layer.

Whole weights in 16 bits have rounding errors, and methods take no direction for a task's that is no
stronger. Factors in 16 bits have none: the update is their product itself, which is computed in
float32. The base of zeros says so, since its rounding has no energy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusion_bench_nufilt.nufilt.low_rank import LowRank

from .engine import LayerInProgress


@dataclass(frozen=True)
class Basis:
    """Bases of the outputs and inputs that the tasks of a layer reach, orthonormal if it is merged
    in them.
    """

    outputs: Tensor  # Q, (d_o, m)
    inputs: Tensor | None  # P, (d_i, n); None stands for the layer's own inputs

    @classmethod
    def of(
        cls, lefts: Sequence[Tensor], rights: Sequence[Tensor], sides: str
    ) -> tuple["Basis", list[Tensor], list[Tensor]]:
        """Return the bases of left ``(d_o, r)`` and right factors ``(r, d_i)``, of at least one
        direction in all, and the factors in them, ``(m, r)`` and ``(r, n)``.

        ``sides`` has the method's ``sides_in_basis``, "o" or "oi".
        """
        Q, lefts_in_basis = _basis_of(lefts)
        if "i" not in sides:
            return cls(Q, None), lefts_in_basis, list(rights)
        P, columns = _basis_of([right.mT for right in rights])
        return cls(Q, P), lefts_in_basis, [column.mT for column in columns]

    def product(self, update: Tensor) -> LowRank:
        """Return the factors of the update ``(d_o, d_i)`` that is ``(m, n)`` in the bases."""
        if self.inputs is None:
            return LowRank(self.outputs, update)
        return LowRank(self.outputs @ update, self.inputs.mT)

    def expand(self, value: Tensor, axes: str) -> Tensor:
        """Return a tensor of a method's state with the layer's own outputs and inputs."""
        return along_axes(value, axes, {"o": self.outputs, "i": self.inputs})


def _basis_of(columns: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return an orthonormal basis of the span of matrices' columns, and the matrices in it."""
    Q, triangle = torch.linalg.qr(torch.cat(list(columns), dim=1))
    return Q, list(triangle.split([matrix.shape[1] for matrix in columns], dim=1))


def along_axes(value: Tensor, axes: str, matrices: Mapping[str, Tensor | None]) -> Tensor:
    """Return a tensor of a method's state, each axis of which is multiplied by its matrix.

    ``axes`` has a letter for each axis, as in the method's ``state_axes``; one without a matrix
    stays as it is.
    """
    for dim, axis in enumerate(axes):
        matrix = matrices.get(axis)
        if matrix is not None:
            product = torch.tensordot(matrix.to(value.dtype), value, dims=([1], [dim]))
            value = product.movedim(0, dim)
    return value


def resize_lists(value: Tensor, axes: str, length: int) -> Tensor:
    """Return a tensor of a method's state whose lists of directions, the axes "k", are cut or
    filled with zeros to a length.
    """
    for dim, axis in enumerate(axes):
        if axis == "k":
            missing = length - value.shape[dim]
            value = pad(value.movedim(dim, -1), (0, missing)).movedim(-1, dim)
    return value.contiguous()


@dataclass
class LayerInBasis(LayerInProgress):
    """A layer that is merged in a basis of its tasks' directions, where its base is zero."""

    basis: Basis
    factors: dict[int, LowRank]  # of the tasks that change the layer, in the basis, by number


def best_factors(update: LowRank, rank: int) -> tuple[LowRank, tuple[float, float]]:
    """Return the best approximation of an update by factors of a rank, which have one strength, the
    strongest direction first, with zeros behind what directions there are; and the energies, the
    squared norms, of the approximation and of the update.
    """
    Q, left = torch.linalg.qr(update.left.double())
    P, right = torch.linalg.qr(update.right.mT.double())
    U, s, Vh = torch.linalg.svd(left @ right.mT)
    count = min(rank, len(s))
    strength = s[:count].sqrt()
    new_left = pad(Q @ (U[:, :count] * strength), (0, rank - count))
    new_right = pad(P @ (Vh[:count].mT * strength), (0, rank - count)).mT
    energies = s.square()
    energy = (energies[:count].sum().item(), energies.sum().item())
    return LowRank(new_left, new_right).to(update.left.dtype), energy
