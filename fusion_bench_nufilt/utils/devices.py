"""Where layers are solved: on which devices, in which threads, with which products, in how much
memory, and what fails there.
"""

import functools
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from threading import RLock
from typing import Any, Generic, Literal, TypeVar

import psutil
import torch

_T = TypeVar("_T")
_R = TypeVar("_R")

log = logging.getLogger(__name__)
warn_once = functools.cache(log.warning)

Devices = torch.device | str | Sequence[torch.device | str]
"""One device, a list of devices, or a string of their names with commas between them."""

#: One batch of layers is read, one is solved and one is written at a time.
BATCHES_PER_GPU = 3


def workers_on(devices: Sequence[torch.device]) -> int:
    """Return the number of batches of layers that are worked on at a time: on a CPU, one a
    thread.
    """
    if devices[0].type == "cpu":
        return torch.get_num_threads()
    return BATCHES_PER_GPU * len(devices)


def check_devices(devices: Devices) -> list[torch.device]:
    """Return the devices; raise a ValueError if PyTorch cannot use one, or if they would not give
    the same bits.
    """
    names: Sequence[torch.device | str]
    if isinstance(devices, str):
        names = devices.split(",")
    elif isinstance(devices, torch.device):
        names = [devices]
    else:
        names = devices
    checked = [_check_device(name) for name in names]
    if len({device.type for device in checked}) != 1:
        listing = ", ".join(map(str, checked)) or "none"
        raise ValueError(f"devices must be of one kind, got {listing}")
    return checked


def _check_device(name: torch.device | str) -> torch.device:
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"device '{device}': layers are computed on cpu or cuda only; choose device=cpu"
            )
        # PyTorch loads its solvers for GPUs at their first use, which fails if two threads come to
        # it together.
        torch.linalg.eigh(torch.eye(1, dtype=torch.float32, device=device))
    except (RuntimeError, AssertionError) as error:  # a PyTorch without CUDA, or no such device
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device '{name}': PyTorch can't compute there: {reason}; choose device=cpu"
        ) from error
    return device


def fast_in_float64(device: torch.device) -> bool:
    """Tell whether a device computes in float64 at half its float32 rate or faster, as NVIDIA's
    P100 to B200 do.
    """
    capabilities = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in capabilities


class DevicePool(Generic[_T]):
    """Devices or CUDA streams that each compute for one thread at a time; a single one computes for
    all threads.
    """

    def __init__(self, devices: Sequence[_T]) -> None:
        self._only = devices[0] if len(devices) == 1 else None
        self._free: SimpleQueue[_T] = SimpleQueue()
        for device in devices:
            self._free.put(device)

    @contextmanager
    def free(self) -> Iterator[_T]:
        """Wait for one that is free, and hold it."""
        if self._only is not None:
            yield self._only
            return
        device = self._free.get()
        try:
            yield device
        finally:
            self._free.put(device)


def map_layers(
    function: Callable[[_T], _R],
    items: Sequence[_T],
    device: torch.device,
    workers: int | None = None,
) -> Generator[_R, None, None]:
    """Yield the results in order; until the last one is taken, float32 products keep full
    precision.

    Whoever may not take them all closes this generator, which waits for the layers in progress.

    On a CPU, each of torch's threads (or of ``workers``, if fewer) computes a layer alone. That
    beats using all threads on one layer (eigenvalue solvers hardly scale), does not stall on a busy
    machine, and gives the same bits for any number of threads. Where there is one, or an
    accelerator without ``workers``, the caller's thread does everything.
    """
    begin = None
    if device.type == "cpu":
        threads = torch.get_num_threads()
        begin = _single_threaded
    else:
        threads = workers or 1
    with exact_products:
        if threads == 1:
            yield from map(function, items)
        else:
            yield from _side_by_side(function, items, min(workers or threads, threads), begin)


def _side_by_side(
    function: Callable[[_T], _R],
    items: Sequence[_T],
    workers: int,
    begin: Callable[[], None] | None,
) -> Iterator[_R]:
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, initializer=begin)
    ahead: deque[Future[_R]] = deque()
    try:
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > 2 * workers:  # Finished results wait in memory until they are taken.
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _single_threaded() -> None:
    # A thread takes over the process's number when it first asks for it, and another merge may have
    # set that.
    torch.get_num_threads()
    torch.set_num_threads(1)


class _ExactProducts:
    """While any merge is under way, float32 products are not rounded to TF32 (CUDA) or bfloat16
    (CPU).

    The process has one setting: the first merge changes it, and the last one, whichever that is,
    puts the user's back.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector may close another merge in the thread that holds it.
        self._lock = RLock()
        self._merges = 0
        self._restore = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._merges += 1
            if self._merges == 1:
                _make_products_exact(self._restore)

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._merges -= 1
            if self._merges == 0:
                self._restore.close()


exact_products = _ExactProducts()
# What torch.backends.cuda.matmul.fp32_precision and its like are made of. The attribute of
# torch.backends.mkldnn itself, in torch 2.13, sets another one than it shows.
_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
_set_precision: Any = getattr(torch._C, "_set_fp32_precision_setter", None)


def _make_products_exact(restore: ExitStack) -> None:
    """Turn rounding off until ``restore`` is closed."""
    if not hasattr(torch.backends, "fp32_precision"):  # torch before 2.9
        restore.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
        return
    for backend in ("cuda", "mkldnn"):
        precision = _precision(backend, "matmul")
        if precision == "ieee":
            continue
        # Torch does not tell a setting for these products from the backend's that they follow.
        if precision == _precision(backend, "all"):
            precision = "none"
        restore.callback(_set_precision, backend, "matmul", precision)
        _set_precision(backend, "matmul", "ieee")


# Each worker's stack, allocator arena and buffers for matrix products: measured, and rounded up.
_WORKER_BYTES = 64 * 2**20


def process_memory(workers: int) -> int:
    """Return the bytes that the process takes besides the layers: its present size, and its
    workers' overhead.
    """
    return int(psutil.Process().memory_info().rss) + workers * _WORKER_BYTES


def free_memory(device: torch.device) -> int:
    """Return the bytes of a device's memory that nobody uses."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


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
