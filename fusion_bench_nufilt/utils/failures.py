"""What fails on a device while layers are solved."""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

log = logging.getLogger(__name__)
warn_once = functools.cache(log.warning)


class DeviceOutOfMemoryError(ValueError):
    """A device has no room for a layer."""


def classify_error(
    error: Exception,
) -> Literal["too little memory", "a solver failed"] | None:
    """Return which failure of a device an error reports, if any."""
    text = str(error).lower()
    # PyTorch's allocator, the driver and CUDA's libraries each report the same in an error of their
    # own.
    if (
        isinstance(error, torch.cuda.OutOfMemoryError | DeviceOutOfMemoryError)
        or "out of memory" in text
        or "alloc_failed" in text
    ):
        return "too little memory"
    if isinstance(error, torch.linalg.LinAlgError) or "cusolver" in text:
        return "a solver failed"
    return None


@contextmanager
def oom_as_error(layer: str, device: torch.device) -> Iterator[None]:
    """Turn an error about too little memory on a device into one that names the layer."""
    try:
        yield
    except RuntimeError as error:
        if classify_error(error) != "too little memory":
            raise
        failure = error.with_traceback(None)  # a traceback would hold the matrices
        remedy = "choose device=cpu, or free memory there"
        raise DeviceOutOfMemoryError(
            f"layer {layer}: no room on device '{device}'; {remedy} ({failure})"
        ) from failure
