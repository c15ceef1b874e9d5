"""A task whose update is given by its factors, as that of a LoRA is."""

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
        """The shape of the update, ``(..., d_o, d_i)``."""
        return (*self.left.shape[:-1], self.right.shape[-1])

    @property
    def rank(self) -> int:
        """The length r of the factors' common side."""
        return self.left.shape[-1]

    def product(self) -> Tensor:
        r"""Return the update :math:`\tau`, ``(..., d_o, d_i)``."""
        return self.left @ self.right

    def to(self, device: torch.device) -> "LowRank":
        """Return the same factors on a device."""
        return LowRank(self.left.to(device), self.right.to(device))

    def in_basis(self) -> tuple[Tensor | None, Tensor]:
        r"""Return an orthonormal basis Q of the outputs that the update reaches, and K with :math:`\tau = Q K`.

        Q is ``(..., d_o, r)`` and K is ``(..., r, d_i)``. Where r is no smaller than a side of the update, they are
        None and the update itself.
        """
        if self.rank >= min(self.shape[-2:]):
            return None, self.product()
        Q, triangle = torch.linalg.qr(self.left)
        return Q, triangle @ self.right
