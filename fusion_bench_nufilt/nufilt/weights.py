"""The weights that a merging step takes: their forms, their precision, and the checks that refuse
bad ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    r"""The factors of a task's update: :math:`\tau = L R` and :math:`\theta_t = \theta_0 + L R`."""

    left: Tensor  # L, (..., d_o, r)
    right: Tensor  # R, (..., r, d_i)

    def __post_init__(self) -> None:
        left, right = tuple(self.left.shape), tuple(self.right.shape)
        if min(len(left), len(right)) < 2 or left[-1] != right[-2]:
            raise ValueError(f"factors of shapes {left} and {right} have no product")

    @property
    def shape(self) -> tuple[int, ...]:
        """``(..., d_o, d_i)``."""
        return (*self.left.shape[:-1], self.right.shape[-1])

    @property
    def rank(self) -> int:
        """r, the length of the common side."""
        return self.left.shape[-1]

    def product(self) -> Tensor:
        r"""Return :math:`\tau`."""
        return self.left @ self.right

    def norm(self) -> Tensor:
        """Return the Frobenius norm of the update, ``(...)``, in float64."""
        left, right = self.left.double(), self.right.double()
        return ((left.mT @ left) * (right @ right.mT)).sum(dim=(-2, -1)).clamp_min(0).sqrt()

    def to(self, device: torch.device) -> "LowRank":
        return LowRank(self.left.to(device), self.right.to(device))

    def double(self) -> "LowRank":
        return LowRank(self.left.double(), self.right.double())

    def in_basis(self) -> tuple[Tensor | None, Tensor]:
        r"""Return an orthonormal basis Q of the outputs that the update reaches, and K with
        :math:`\tau = Q K`.

        Q is ``(..., d_o, r)`` and K is ``(..., r, d_i)``. Where r is no smaller than a side of the
        update, they are None and the update itself.
        """
        if self.rank >= min(self.shape[-2:]):
            return None, self.product()
        Q, triangle = torch.linalg.qr(self.left)
        return Q, triangle @ self.right


Layers = Mapping[str, Tensor]
TaskLayers = Mapping[str, Tensor | LowRank]


def wide_dtype(values: Tensor) -> torch.dtype:
    """Return the dtype in which to compute with stored values: float32 at least."""
    return torch.promote_types(values.dtype, torch.float32)


def widened(values: Tensor) -> Tensor:
    """Return the values in the dtype of :func:`wide_dtype`."""
    return values.to(wide_dtype(values))


def check_layers(reference: Layers, layers: TaskLayers, *, model: str) -> None:
    """Raise a ValueError that names the model and the layer if it cannot be merged with the
    reference's.

    It is missing, unknown, not a matrix, of another shape, not floating point or not finite.
    """
    for name, weight in reference.items():
        if name not in layers:
            raise ValueError(
                f"model '{model}' lacks layer '{name}' {tuple(weight.shape)} of the pretrained "
                "model"
            )
        other, what = layers[name], f"model '{model}', layer '{name}'"
        matrices = (other.left, other.right) if isinstance(other, LowRank) else (other,)
        for matrix in matrices:
            if matrix.ndim != 2 or not matrix.is_floating_point():
                got = f"got shape {tuple(matrix.shape)} of {matrix.dtype}"
                raise ValueError(f"{what}: expected a floating-point matrix, {got}")
        if other.shape != weight.shape:
            shapes = (
                f"shape {tuple(other.shape)} differs from the pretrained model's "
                f"{tuple(weight.shape)}"
            )
            raise ValueError(f"{what}: {shapes}")
        if not all(map(is_finite, matrices)):
            raise ValueError(f"{what}: the weight has NaN or infinite values")
    if extra := layers.keys() - reference.keys():
        raise ValueError(
            f"model '{model}' has layers that the pretrained model lacks: {sorted(extra)}"
        )


def is_finite(values: Tensor) -> bool:
    """Tell whether no value is NaN or infinite, as a rule in one pass and without a temporary of
    their size.
    """
    wide = wide_dtype(values)
    # A sum shows every NaN and infinity. Finite values may overflow it, so that each is then
    # checked.
    return bool(torch.isfinite(values.sum(dtype=wide))) or bool(torch.isfinite(values).all())
