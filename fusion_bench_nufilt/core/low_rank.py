"""A task whose update is known by its factors, as that of a LoRA is."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    r"""A task of which the update is given: :math:`\tau = L R`, and :math:`\theta_t = \theta_0 + L R`."""

    left: Tensor  # L, (..., d_o, r)
    right: Tensor  # R, (..., r, d_i)

    def __post_init__(self) -> None:
        left, right = tuple(self.left.shape), tuple(self.right.shape)
        if min(len(left), len(right)) < 2 or left[-1] != right[-2]:
            raise ValueError(f"factors of shapes {left} and {right} have no product")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the update, ``(..., d_o, d_i)``."""
        return (*self.left.shape[:-1], self.right.shape[-1])

    @property
    def rank(self) -> int:
        """r, the length of the factors' common side."""
        return self.left.shape[-1]

    def product(self) -> Tensor:
        r"""The update :math:`\tau`, ``(..., d_o, d_i)``."""
        return self.left @ self.right

    def to(self, device: torch.device) -> "LowRank":
        """The same factors on a device."""
        return LowRank(self.left.to(device), self.right.to(device))

    def in_basis(self) -> tuple[Tensor | None, Tensor]:
        r"""An orthonormal basis of the outputs that the update reaches, and the update in it: :math:`\tau = Q K`.

        Returns:
            Q ``(..., d_o, r)`` and K ``(..., r, d_i)``; where r is no smaller than a side of the update, None and
            the update itself.
        """
        if self.rank >= min(self.shape[-2:]):
            return None, self.product()
        Q, triangle = torch.linalg.qr(self.left)
        return Q, triangle @ self.right
