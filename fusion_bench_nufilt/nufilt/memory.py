"""The memory that a merging step takes."""

from collections.abc import Sequence

from .config import StepConfig


def working_bytes(shape: Sequence[int], itemsize: int, config: StepConfig) -> int:
    """Return the most bytes that a layer ``(d_o, d_i)`` takes while it is solved, at
    ``itemsize`` an element.
    """
    d_o, d_i = shape
    shorter, longer = sorted(shape)
    ranks = config.ranks(d_i)
    protected = min(ranks.null, shorter)
    block = min(shorter, 2 * protected + 16)
    # The Gram matrix of tau is held twice, once stacked.
    gram = 2 * d_i**2 if d_i <= 2 * d_o else 0
    # While singular vectors are computed, these are theta_0, theta, tau, and tau or
    # tau_merged in float64; then the Gram matrix of the latter with its eigenvectors
    # and the solver's workspace, or the eigenvectors and thin matrices, all in float64,
    # too. Afterwards there is tau P with its temporary.
    solver = max(
        8 * shorter**2,
        2 * shorter**2 + 3 * longer * (block + protected) + 8 * shorter * block,
    )
    subspaces = 5 * d_o * d_i + gram + solver
    # While the adapter is fitted, these are tau, the new weights, and thin matrices: A
    # and B with their gradients and what Adam keeps of them, and V and H.
    columns = protected + min(ranks.task, shorter)
    adapter = (
        2 * d_o * d_i
        + gram
        + d_i * (10 * ranks.lora + 4 * columns)
        + 4 * ranks.lora * (columns + ranks.lora)
    )
    return itemsize * max(subspaces, adapter)
