"""In what numbers are computed."""

import torch
from torch import Tensor


def widened(values: Tensor) -> Tensor:
    """In float32 at least, in which sums and differences of stored values are formed."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
