"""How much memory a layer takes while it is merged, predicted before the start and held during the run."""

import ctypes
import math
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil

from fusion_bench_nufilt.core.workers import working_bytes

# Each worker's stack, allocator arena and buffers of the matrix products; measured, rounded up.
WORKER_BYTES = 64 * 2**20
_M_MMAP_THRESHOLD = -3  # from malloc.h: blocks above are mapped by themselves


def process_memory(workers: int) -> int:
    """Bytes that the process takes apart from the layers: what it takes now, and its workers' overhead."""
    return int(psutil.Process().memory_info().rss) + workers * WORKER_BYTES


def layer_memory(shape: Sequence[int], stored: int, *, wide: int, on_cpu: bool) -> int:
    """Bytes held while a layer is merged.

    Args:
        shape: ``(d_o, d_i)``.
        stored: bytes per element of base, merged and task weight together, as they are read.
        wide: bytes per element of the computation: 4, or 8 for float64.
        on_cpu: whether the computation is in this memory, too.
    """
    return stored * math.prod(shape) + (working_bytes(shape, wide) if on_cpu else 0)


def return_freed_memory() -> None:
    """Have freed matrices go back to the system at once, where the C library is glibc.

    By itself it keeps freed blocks of up to 32 MB for later, per thread, and a process of many threads then takes
    twice what it uses.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 4 * 2**20)


class Budget:
    """Lets threads go on while what they reserved together stays within a bound.

    Args:
        nbytes: the bound; a single reservation above it goes alone.
    """

    def __init__(self, nbytes: int) -> None:
        self._bound, self._used = nbytes, 0
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        """Wait until there is room for ``nbytes``, and hold it."""
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + nbytes <= self._bound)
            self._used += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()
