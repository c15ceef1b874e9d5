"""Layers side by side: one per thread on a CPU, stacked on an accelerator."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import RLock
from typing import TypeVar

import torch

_T = TypeVar("_T")
_R = TypeVar("_R")


def map_layers(
    function: Callable[[_T], _R], items: Sequence[_T], where: torch.device, workers: int | None = None
) -> Iterator[_R]:
    """Results in order; on a CPU a layer per thread (torch's number of threads, or fewer ``workers``), each with
    single-threaded mathematics; elsewhere in the caller's thread, or in one for each of several devices (``workers``).

    That beats parallel mathematics on one layer (eigenvalue solvers hardly scale), does not stall on a busy machine,
    and makes the result independent of the number of threads, to the last bit. Where torch has one thread, as in such
    a worker, all is done in the caller's. Until the last result is taken, products of float32 matrices are exact.
    """
    threads = torch.get_num_threads() if where.type == "cpu" else workers or 1
    with _exact_products:
        if threads == 1:
            yield from map(function, items)
        else:
            yield from side_by_side(function, items, min(workers or threads, threads))


def side_by_side(function: Callable[[_T], _R], items: Sequence[_T], workers: int) -> Iterator[_R]:
    """Results in order, of so many threads, each with single-threaded mathematics."""
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=_single_threaded) as pool:
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


def _single_threaded() -> None:
    # A thread's first look at the number takes over the process's, which another merge may have set meanwhile.
    torch.get_num_threads()
    torch.set_num_threads(1)


class _ExactProducts:
    """While any merge is under way, float32 products are not rounded to TF32 (CUDA) or bfloat16 (CPU).

    The setting is one for the whole process. The first merge changes it and the last one puts the user's back, so
    that merges may overlap and end in any order.
    """

    def __init__(self) -> None:
        self._lock = RLock()  # the garbage collector may close another merge in a thread that holds the lock
        self._merges = 0
        self._restore: Callable[[], None]

    def __enter__(self) -> None:
        with self._lock:
            self._merges += 1
            if self._merges == 1:
                self._restore = _make_products_exact()

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._merges -= 1
            if self._merges == 0:
                self._restore()


_exact_products = _ExactProducts()


def _make_products_exact() -> Callable[[], None]:
    """Turn rounding off, and return a function that sets what was set before."""
    if not hasattr(torch.backends, "fp32_precision"):  # torch before 2.9
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        return partial(torch.set_float32_matmul_precision, precision)
    products = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    precisions = [product.fp32_precision for product in products]
    for product in products:
        product.fp32_precision = "ieee"

    def restore() -> None:
        for product, before in zip(products, precisions, strict=True):
            product.fp32_precision = before

    return restore


def working_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes that a layer ``(d_o, d_i)`` takes at most while it is worked on, ``itemsize`` for each element."""
    d_o, d_i = shape
    # theta, tau, tau_merged, tau P and its temporary, or a copy of tau_merged in float64 in place of the last two;
    # the Gram matrix of tau (twice, once stacked), and that of tau_merged with its eigenvectors and the solver's
    # workspace, all in float64, should float32 not be enough.
    gram = (2 * d_i**2 if d_i <= 2 * d_o else 0) + 8 * min(d_o, d_i) ** 2
    return itemsize * (5 * d_o * d_i + gram)


def stack_size(shape: Sequence[int], itemsize: int, where: torch.device, batch_bytes: int) -> int:
    """How many layers of a shape are solved together: one on a CPU, else what ``batch_bytes`` of memory hold."""
    return 1 if where.type == "cpu" else max(1, batch_bytes // working_bytes(shape, itemsize))
