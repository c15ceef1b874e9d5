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

CPU = torch.device("cpu")
TO = torch.Tensor.to
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "_linalg_eigh",
    "_linalg_svd",
    "_linalg_check_errors",
}
SOLVERS = {"_linalg_eigh", "_linalg_svd", "linalg_qr", "linalg_cholesky_ex"}


def allow(name, tensors):
    """Let every operation pass, as :attr:`Ledger.before` does unless a test sets another."""


class Ledger:
    """What happened on the GPUs since :meth:`reset`."""

    def __init__(self):
        self.capacity = None  # bytes of each GPU
        self.before = allow  # called before each operation on a GPU; it may raise
        # States of the generators, by GPU.
        self.random = defaultdict(lambda: torch.zeros(16, dtype=torch.uint8))
        self.live = defaultdict(int)  # bytes of tensors, by GPU
        self._lock = threading.RLock()
        self.reset()

    def reset(self):
        self.up = Counter()  # transfers to a GPU, by shape
        self.down = Counter()  # transfers from a GPU, by shape
        self.waits = Counter()  # by functions
        self.operations = Counter()  # by name and shape
        self.gpus = Counter()  # operations, by GPU
        self.peak = defaultdict(int, self.live)

    def at_work(self):
        """Return how many GPUs did more than what is tried before a merge begins."""
        return sum(operations > 1 for operations in self.gpus.values())

    def room(self, gpu):
        if self.capacity is None:
            return 2**40
        return self.capacity - self.live[gpu]

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
        functions = []
        frame = sys._getframe(1)
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
    is_cuda = True
    is_cpu = False
    is_meta = False

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
        self.inner = inner
        self.gpu = device
        storage = inner.untyped_storage()
        if not hasattr(storage, "gpu"):
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
    name = func.overloadpacket.__name__
    tensors = tensors_in(args) + tensors_in(kwargs.values())
    devices = {x.device for x in tensors if isinstance(x, OnGPU)}
    if not devices and "device" not in kwargs:
        return func(*args, **kwargs)
    target = kwargs.get("device") or torch.device("meta")
    if target.type == "meta" and devices:
        target = next(iter(devices))
    target = numbered(target)
    if name == "scalar_tensor" and target.type == "meta":
        # PyTorch's own code made it for an operation on a GPU.
        target = CPU
        kwargs = {**kwargs, "device": CPU}
    if target.type not in ("cpu", "cuda") or (not devices and target.type == "cpu"):
        return func(*args, **kwargs)
    if target.type == "cuda" and target.index >= torch.cuda.device_count():
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    if (
        name == "_to_copy"
        and tensors[0].device == target
        and kwargs.get("dtype", tensors[0].dtype) == tensors[0].dtype
    ):
        return tensors[0]  # PyTorch's own code took it for a tensor on another device
    if name == "_to_copy":
        note_transfer(tensors[-1], target)
    elif name == "copy_":
        note_transfer(tensors[-1], tensors[0].device)
    elif devices:
        refuse_several(name, tensors, devices)
        ledger.before(name, tensors)
        ledger.operations[name, tuple(tensors[0].shape)] += 1
        ledger.gpus[target.index] += 1
    if name in WAITS:
        ledger.wait()
    operands = {id(x.inner): x for x in tensors if isinstance(x, OnGPU)}
    values, options = mapped(on_cpu, (args, kwargs))
    if "device" in options:
        options = {**options, "device": CPU}

    def on_target(x):
        if not isinstance(x, torch.Tensor) or target.type == "cpu":
            return x
        if id(x) in operands:  # an operation in place
            return operands[id(x)]
        return OnGPU(x, target)

    return mapped(on_target, func(*values, **options))


def on_cpu(x):
    if isinstance(x, OnGPU):
        return x.inner
    return x


def tensors_in(values):
    """Return the tensors among values and in lists of them."""
    tensors = []
    for x in values:
        if isinstance(x, torch.Tensor):
            tensors.append(x)
        elif isinstance(x, list | tuple):
            tensors += tensors_in(x)
    return tensors


def mapped(function, x):
    """Apply a function to all values in lists, tuples and dicts, in less time than PyTorch's
    ``tree_map``.
    """
    if isinstance(x, list | tuple):
        return type(x)([mapped(function, value) for value in x])
    if isinstance(x, dict):
        return {key: mapped(function, value) for key, value in x.items()}
    return function(x)


def numbered(device):
    """Return the first GPU for one without a number, which a PyTorch without CUDA can't find."""
    if isinstance(device, str | torch.device) and str(device) == "cuda":
        return torch.device("cuda", 0)
    return device


def to(tensor, *args, **kwargs):
    """Do the work of ``Tensor.to``, also for a tensor on a GPU in place of a device and a dtype."""
    if args and isinstance(args[0], OnGPU):
        args = args[0].device, args[0].dtype, *args[1:]
    is_copied = kwargs.pop("copy", False)
    moved = TO(tensor, *map(numbered, args), **kwargs)
    # A copy on the same device is not told from what PyTorch's own code asks for.
    if is_copied and moved is tensor:
        return tensor.clone()
    return moved


def note_transfer(source, target):
    if source.device.type == target.type:
        return
    if target.type == "cuda":
        ledger.up[tuple(source.shape)] += 1
    else:
        ledger.down[tuple(source.shape)] += 1
    if target.type == "cpu":
        ledger.wait()


def refuse_several(name, tensors, devices):
    """Raise CUDA's error for operands on several devices; numbers and indices may lie on the
    CPU.
    """
    devices = set(devices)
    if "index" not in name:
        devices |= {x.device for x in tensors if x.device.type != "cuda" and x.ndim > 0}
    if len(devices) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found {devices} in {name}"
        )


class LateLibrary:
    """The first solver loads a library, and another one that begins meanwhile fails, as in
    PyTorch.
    """

    def __init__(self):
        self.loading = threading.Lock()
        self.loaded = threading.Event()

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
    start = threading.Thread._bootstrap_inner
    ledger.capacity = None
    ledger.before = allow
    ledger.live = defaultdict(int)  # tensors of an earlier block may still be alive
    ledger.reset()

    def under_rules(thread):
        with Rules():
            start(thread)

    def free_and_total(gpu):
        free = ledger.room(gpu.index)
        return free, free

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
            ("mem_get_info", free_and_total),
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
