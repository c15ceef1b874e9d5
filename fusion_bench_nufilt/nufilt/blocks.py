"""Large matrices, some rows at a time."""

from torch import Tensor


def row_blocks(X: Tensor) -> list[slice]:
    """Return slices of the rows of matrices ``(..., m, d)``, to compute with one after
    the other: blocks of 2^17 elements, which stay in a processor's cache; on an
    accelerator, all rows at once.
    """
    step = max(1, X.shape[-2])
    if X.device.type == "cpu":
        step = max(1, 2**17 * step // max(1, X.numel()))
    return [slice(first, first + step) for first in range(0, X.shape[-2], step)]
