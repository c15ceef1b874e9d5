"""What fails on a device while layers are solved, and what is done about it."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch

_R = TypeVar("_R")

log = logging.getLogger(__name__)
warn_once = functools.cache(log.warning)


class SteepSpectrumError(torch.linalg.LinAlgError):
    """A spectrum falls too steeply for float32, as where a matrix has exactly low rank."""


class NoRoomError(ValueError):
    """A device has no room for a layer."""


def why_it_failed(error: RuntimeError) -> Literal["too little memory", "a solver failed"] | None:
    """Return which failure of a device an error reports, if any."""
    text = str(error).lower()
    # PyTorch's allocator, the driver and CUDA's libraries each report the same in an error of their
    # own.
    if (
        isinstance(error, torch.cuda.OutOfMemoryError)
        or "out of memory" in text
        or "alloc_failed" in text
    ):
        return "too little memory"
    if isinstance(error, torch.linalg.LinAlgError) or "cusolver" in text:
        return "a solver failed"
    return None


@contextmanager
def room_for(layer: str, where: torch.device) -> Iterator[None]:
    """Turn an error about too little memory on a device into a NoRoomError that names the layer."""
    try:
        yield
    except RuntimeError as error:
        if why_it_failed(error) != "too little memory":
            raise
        failure = error.with_traceback(None)  # a traceback would hold the matrices
        remedy = "choose device=cpu, or free memory there"
        raise NoRoomError(
            f"layer {layer}: no room on device '{where}'; {remedy} ({failure})"
        ) from failure


def solve_alone(
    layer: str, where: torch.device, attempts: Sequence[tuple[str, Callable[[], _R]]]
) -> _R:
    """Return the result of the first attempt in which no solver fails.

    Each has the name of what computes, which the log gives when that takes over; the last one is
    float64 on the CPU. ``layer`` is the layer's name and shape, for messages. A NoRoomError says
    that the device has no room for it, and a ValueError that solvers failed in all attempts.
    """
    failure: RuntimeError | None = None
    for name, attempt in attempts:
        if isinstance(failure, SteepSpectrumError):
            # Nothing is wrong: a LoRA that was merged into its base has exactly low rank.
            log.debug("layer %s: %s; %s computes it", layer, failure, name)
        elif failure is not None:
            warn_once("%s: %s takes over in such layers, which is slower", str(failure), name)
        try:
            with room_for(layer, where):
                return attempt()
        except RuntimeError as error:
            if why_it_failed(error) is None:
                raise
            failure = error.with_traceback(None)
    raise ValueError(
        f"layer {layer}: no singular vectors, in float64 on the CPU either: {failure}"
    ) from failure
