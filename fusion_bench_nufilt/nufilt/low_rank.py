"""Tasks that are given by the factors of their update, such as LoRA adapters."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    r"""The factors of a task's update: :math:`\tau = L R` and
    :math:`\theta_t = \theta_0 + L R`.
    """

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
        r"""Return :math:`\tau`, in float32 at least."""
        dtype = torch.promote_types(self.left.dtype, torch.float32)
        return self.left.to(dtype) @ self.right.to(dtype)

    def norm(self) -> Tensor:
        """Return the Frobenius norm of the update, ``(...)``, in float64."""
        left, right = self.left.double(), self.right.double()
        squared_norm = ((left.mT @ left) * (right @ right.mT)).sum(dim=(-2, -1))
        return squared_norm.clamp_min(0).sqrt()

    def to(self, target: torch.device | torch.dtype) -> "LowRank":
        return LowRank(self.left.to(target), self.right.to(target))

    def in_basis(self) -> tuple[Tensor | None, Tensor]:
        r"""Return an orthonormal basis Q of the outputs that the update reaches, and K
        with :math:`\tau = Q K`.

        Q is ``(..., d_o, r)`` and K is ``(..., r, d_i)``. Where r is no smaller than a
        side of the update, they are None and the update itself.
        """
        if self.rank >= min(self.shape[-2:]):
            return None, self.product()
        Q, triangle = torch.linalg.qr(self.left)
        return Q, triangle @ self.right
