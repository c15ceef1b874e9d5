"""What glibc does with memory that is freed. Of other C libraries, nothing is asked."""

import ctypes
import sys
from collections.abc import Mapping

# The numbers by which glibc's malloc.h knows these parameters.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8

# What this process has set: the first to do so decides.
_parameters: dict[int, int] = {}


def give_back_freed_memory() -> None:
    """Have glibc give blocks above 4 MB back to the system when they are freed, and every thread
    keep 16 MB for smaller ones: for a process that does other things after a merge.

    By default, a thread keeps freed blocks of up to 32 MB, and a process of many threads takes
    twice what it uses; of smaller ones, it keeps next to nothing, and the system clears their
    memory again and again.
    """
    _set({_M_MMAP_THRESHOLD: 4 * 2**20, _M_TRIM_THRESHOLD: 16 * 2**20})


def keep_freed_memory() -> None:
    """Have glibc keep what is freed for the next block, whichever thread asks for it, so that the
    system clears memory but once: for a process that ends with its merge.

    It comes before other threads, since a thread that has a heap by itself stays with it, and what
    one thread frees there no other can use.
    """
    _set({_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1})


def _set(parameters: Mapping[int, int]) -> None:
    if _parameters or sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack it
    if mallopt is None:
        return
    for number, value in parameters.items():
        mallopt(number, value)
    _parameters.update(parameters)
