"""Layers side by side."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

_T = TypeVar("_T")
_R = TypeVar("_R")


def map_layers(
    function: Callable[[_T], _R], items: Sequence[_T], where: torch.device, workers: int | None = None
) -> Iterator[_R]:
    """Results in order; on a CPU a layer per thread (torch's number of threads, or fewer ``workers``), each with
    single-threaded mathematics.

    That beats parallel mathematics on one layer (eigenvalue solvers hardly scale), does not stall on a busy machine,
    and makes the result independent of the number of threads, to the last bit.
    """
    if where.type != "cpu":
        yield from map(function, items)
        return
    threads = torch.get_num_threads()
    workers = min(workers or threads, threads)
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            # Not all at once: what is finished waits in memory until it is taken.
            ahead: deque[Future[_R]] = deque()
            try:
                for item in items:
                    ahead.append(pool.submit(function, item))
                    if len(ahead) > 2 * workers:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:  # after an error or an interrupt, what has not begun never does
                for future in ahead:
                    future.cancel()
    finally:
        torch.set_num_threads(threads)
