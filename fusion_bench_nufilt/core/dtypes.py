"""The precision of all computations: float32 at least, whatever the values are stored in."""

import torch
from torch import Tensor


def wide_dtype(values: Tensor) -> torch.dtype:
    """Return the dtype in which sums and differences of stored values are formed."""
    return torch.promote_types(values.dtype, torch.float32)


def widened(values: Tensor) -> Tensor:
    """Return the values in the dtype of :func:`wide_dtype`."""
    return values.to(wide_dtype(values))
