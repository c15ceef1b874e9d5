"""GPUs that are simulated: tensors in main memory that say they lie on a GPU, under the rules of
one.

A tensor of another device beside one on a GPU is an error, a GPU has a capacity, and a ledger notes
transfers, waits and memory. The arithmetic is the CPU's, so that methods which add up in the same
order give the CPU's bits.
"""

import sys
import threading
import weakref
from collections import Counter, defaultdict
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # it takes stock of functions that are replaced below
from torch.utils._python_dispatch import TorchDispatchMode

CPU, TO = torch.device("cpu"), torch.Tensor.to
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "_linalg_eigh",
    "_linalg_svd",
    "_linalg_check_errors",
}
SOLVERS = {"_linalg_eigh", "_linalg_svd", "linalg_qr", "linalg_cholesky_ex"}


class Ledger:
    """What happened on the GPUs since :meth:`reset`."""

    def __init__(self):
        self.capacity = None  # bytes of each GPU
        self.before = lambda name, tensors: (
            None
        )  # called before each operation on a GPU; it may raise
        self.random = defaultdict(
            lambda: torch.zeros(16, dtype=torch.uint8)
        )  # states of the generators, by GPU
        self.live, self._lock = defaultdict(int), threading.RLock()
        self.reset()

    def reset(self):
        self.up, self.down, self.waits = (
            Counter(),
            Counter(),
            Counter(),
        )  # by shape, by shape, by function
        self.operations, self.gpus = Counter(), Counter()  # by name and shape, by GPU
        self.peak = defaultdict(int, self.live)

    def room(self, gpu):
        return 2**40 if self.capacity is None else self.capacity - self.live[gpu]

    def take(self, storage, gpu):
        with self._lock:
            if self.capacity is not None and self.live[gpu] + storage.nbytes() > self.capacity:
                raise torch.cuda.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {storage.nbytes()} bytes."
                )
            self.live[gpu] += storage.nbytes()
            self.peak[gpu] = max(self.peak[gpu], self.live[gpu])
        weakref.finalize(storage, self._free, self.live, gpu, storage.nbytes()).atexit = False

    def _free(self, live, gpu, nbytes):
        with self._lock:
            live[gpu] -= nbytes

    def wait(self):
        """Note the functions of the package in which the host waits for a GPU."""
        frame, functions = sys._getframe(1), []
        while frame is not None:
            if "fusion_bench_nufilt/" in frame.f_code.co_filename:
                functions.append(frame.f_code.co_name)
            frame = frame.f_back
        self.waits[tuple(functions)] += 1


class Stream:
    """A stream of a GPU, which only tells the GPU."""

    def __init__(self, gpu):
        self.device = numbered(gpu)

    def synchronize(self):
        ledger.wait()


ledger = Ledger()


class OnGPU(torch.Tensor):
    """A tensor on a simulated GPU, with its values in ``inner`` on the CPU.

    For PyTorch's own code it is one on the meta device, since a PyTorch without CUDA knows no
    tensors on a GPU.
    """

    device = property(lambda self: self.gpu)
    is_cuda, is_cpu, is_meta = True, False, False

    @staticmethod
    def __new__(cls, inner, device):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            inner.stride(),
            inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",
        )
        self.inner, self.gpu = inner, device
        if not hasattr(storage := inner.untyped_storage(), "gpu"):
            ledger.take(storage, device.index)
            storage.gpu = device.index
        return self

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, **options):
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first."
        )

    def __tensor_flatten__(self):
        return ["inner"], self.device

    @staticmethod
    def __tensor_unflatten__(inner, device, size, stride):
        return OnGPU(inner["inner"], device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


class Rules(TorchDispatchMode):
    """Lets a thread make tensors on simulated GPUs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    """Do an operation on the CPU, and put its results where they belong."""
    name, tensors = func.overloadpacket.__name__, tensors_in(args) + tensors_in(kwargs.values())
    places = {x.device for x in tensors if isinstance(x, OnGPU)}
    if not places and "device" not in kwargs:
        return func(*args, **kwargs)
    target = kwargs.get("device") or torch.device("meta")
    if target.type == "meta" and places:
        target = next(iter(places))
    target = numbered(target)
    if name == "scalar_tensor" and target.type == "meta":
        target, kwargs = (
            CPU,
            {**kwargs, "device": CPU},
        )  # PyTorch's own code made it for an operation on a GPU
    if target.type not in ("cpu", "cuda") or (not places and target.type == "cpu"):
        return func(*args, **kwargs)
    if target.type == "cuda" and target.index >= torch.cuda.device_count():
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    if (
        name == "_to_copy"
        and tensors[0].device == target
        and kwargs.get("dtype", tensors[0].dtype) == tensors[0].dtype
    ):
        return tensors[0]  # PyTorch's own code took it for a tensor on another device
    if name in ("_to_copy", "copy_"):
        note_transfer(tensors[-1], target if name == "_to_copy" else tensors[0].device)
    elif places:
        refuse_several(name, tensors, places)
        ledger.before(name, tensors)
        ledger.operations[name, tuple(tensors[0].shape)] += 1
        ledger.gpus[target.index] += 1
    if name in WAITS:
        ledger.wait()
    own = {id(x.inner): x for x in tensors if isinstance(x, OnGPU)}
    values, options = mapped(lambda x: x.inner if isinstance(x, OnGPU) else x, (args, kwargs))
    if "device" in options:
        options = {**options, "device": CPU}

    def place(x):
        if not isinstance(x, torch.Tensor) or target.type == "cpu":
            return x
        return own.get(id(x)) if id(x) in own else OnGPU(x, target)

    return mapped(place, func(*values, **options))


def tensors_in(values):
    """Return the tensors among values and in lists of them."""
    found = []
    for x in values:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found += tensors_in(x)
    return found


def mapped(function, x):
    """Apply a function to all values in lists, tuples and dicts, in less time than PyTorch's
    ``tree_map``.
    """
    if isinstance(x, list | tuple):
        return type(x)([mapped(function, each) for each in x])
    return (
        {key: mapped(function, each) for key, each in x.items()}
        if isinstance(x, dict)
        else function(x)
    )


def numbered(device):
    """Return the first GPU for one without a number, which a PyTorch without CUDA can't find."""
    without = isinstance(device, str | torch.device) and str(device) == "cuda"
    return torch.device("cuda", 0) if without else device


def to(tensor, *args, **kwargs):
    """Do the work of ``Tensor.to``, also for a tensor on a GPU in place of a device and a dtype."""
    if args and isinstance(args[0], OnGPU):
        args = args[0].device, args[0].dtype, *args[1:]
    return TO(tensor, *map(numbered, args), **kwargs)


def note_transfer(source, target):
    if source.device.type != target.type:
        (ledger.up if target.type == "cuda" else ledger.down)[tuple(source.shape)] += 1
        if target.type == "cpu":
            ledger.wait()


def refuse_several(name, tensors, places):
    """Raise CUDA's error for operands on several devices; numbers and indices may lie on the
    CPU.
    """
    strays = {
        x.device for x in tensors if x.device.type != "cuda" and x.ndim > 0 and "index" not in name
    }
    if len(places | strays) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found {places | strays} in {name}"
        )


class LateLibrary:
    """The first solver loads a library, and another one that begins meanwhile fails, as in
    PyTorch.
    """

    def __init__(self):
        self.loading, self.loaded = threading.Lock(), threading.Event()

    def __call__(self, name, tensors):
        if name not in SOLVERS or self.loaded.is_set():
            return
        if not self.loading.acquire(blocking=False):
            raise RuntimeError("lazy wrapper should be called at most once")
        self.loaded.wait(0.05)  # for others to come
        self.loaded.set()


@contextmanager
def simulated(count=2, capability=(8, 0)):
    """Let PyTorch have this many GPUs in the block."""
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs of its own")
    start, ledger.capacity, ledger.before = (
        threading.Thread._bootstrap_inner,
        None,
        lambda name, tensors: None,
    )
    ledger.live = defaultdict(int)  # tensors of an earlier block may still be alive
    ledger.reset()

    def under_rules(thread):
        with Rules():
            start(thread)

    with pytest.MonkeyPatch.context() as patch, Rules():
        patch.delenv("LT_ACCELERATOR", raising=False)
        patch.setattr(threading.Thread, "_bootstrap_inner", under_rules)
        patch.setattr(torch.Tensor, "to", to)
        for names, value in (
            ("is_available is_initialized", lambda: True),
            ("device_count", lambda: count),
            ("current_device", lambda: 0),
            ("_lazy_init init empty_cache set_device manual_seed_all", lambda *_: None),
            ("synchronize", lambda *_: ledger.wait()),
            ("current_stream", Stream),
            ("get_device_capability", lambda *_: capability),
            ("get_device_name", lambda *_: "simulated"),
            ("mem_get_info", lambda gpu: (free := ledger.room(gpu.index), free)),
            ("Stream", Stream),
            ("stream", nullcontext),
            ("get_rng_state", lambda gpu=0: ledger.random[gpu]),
            ("set_rng_state", lambda state, gpu=0: ledger.random.update({gpu: state})),
        ):
            for name in names.split():
                patch.setattr(torch.cuda, name, value)
        if hasattr(torch, "accelerator"):
            # Adam of torch 2.15 asks it even where no tensor is on a GPU.
            idle = SimpleNamespace(is_capturing=lambda: False)
            patch.setattr(torch.accelerator, "current_stream", lambda *_: idle)
        yield ledger


_whole_run = simulated()


def pytest_load_initial_conftests():
    """Simulate GPUs for a whole run of ``pytest -p tests.simulated_gpus``."""
    _whole_run.__enter__()
