"""Predict the memory and disk space that a merge will take."""

import ctypes
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence

import psutil
import torch

from fusion_bench_nufilt.models.architecture import Layer
from fusion_bench_nufilt.utils.tensors import FLOATS

from .beside import state_layout, state_tensors
from .engine import batch_size
from .plan import Plan
from .settings import BATCH_BYTES

# Each worker's stack, allocator arena and buffers for matrix products: measured, and rounded up.
_WORKER_BYTES = 64 * 2**20


def process_memory(workers: int) -> int:
    """Return the bytes that the process takes besides the layers: its present size, and its
    workers' overhead.
    """
    return int(psutil.Process().memory_info().rss) + workers * _WORKER_BYTES


def give_back_freed_memory() -> None:
    """Have glibc give blocks above 4 MB back to the system when they are freed.

    By default, every thread keeps freed blocks of up to 32 MB, and a process of many threads takes
    twice what it uses.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(-3, 4 * 2**20)  # M_MMAP_THRESHOLD


def layer_memory(plan: Plan, layer: Layer) -> int:
    """Return the bytes of main memory held while a layer is merged; on a GPU, it only passes
    through there.
    """
    return solving_memory(plan, layer) if plan.settings.on_cpu else _stored_memory(plan, layer)


def solving_memory(plan: Plan, layer: Layer) -> int:
    """Return the bytes held where a layer is merged: its weights and state as read, and working
    memory.
    """
    wide = max(plan.method.itemsize, plan.dtype(layer.keys[0]).itemsize)
    return _stored_memory(plan, layer) + plan.method.working_bytes(layer.view.shape, wide)


def _stored_memory(plan: Plan, layer: Layer) -> int:
    dtype, shape = plan.dtype(layer.keys[0]), layer.view.shape
    # The factors of a LoRA are too thin to count.
    full = [
        task.source.tensors[task.keys[layer.param]]
        for task in plan.tasks
        if layer.param in task.keys
    ]
    stored = (
        dtype.itemsize + max((FLOATS[info.dtype].itemsize for info in full), default=0)
    ) * math.prod(shape)
    if plan.method.state_is_weight and plan.state is None and not plan.keeps_state:
        return stored + dtype.itemsize * math.prod(shape)
    return stored + sum(value.nbytes for _, _, value in state_tensors(plan, layer).values())


def batches(plan: Plan, layers: Sequence[Layer]) -> Iterator[list[Layer]]:
    """Yield the layers that are merged together: one on a CPU, else as many of one shape as are
    solved together.
    """
    groups: dict[tuple[tuple[int, ...], torch.dtype], list[Layer]] = defaultdict(list)
    for layer in layers:
        groups[layer.view.shape, plan.dtype(layer.keys[0])].append(layer)
    for (shape, dtype), group in groups.items():
        itemsize = max(4, dtype.itemsize)
        device = plan.settings.devices[0]
        size = batch_size(plan.method, shape, itemsize, device, BATCH_BYTES)
        if plan.settings.max_memory is not None:
            free = plan.settings.max_memory - process_memory(plan.settings.workers)
            size = max(1, min(size, free // layer_memory(plan, group[0])))
        yield from (group[i : i + size] for i in range(0, len(group), size))


def layer_budget(plan: Plan, workers: int | None = None) -> int:
    """Return the bytes that all layers in progress may take together, by default with this
    process's workers.
    """
    workers, bound = workers or plan.settings.workers, plan.settings.max_memory
    held = sorted(
        sum(layer_memory(plan, layer) for layer in batch) for batch in batches(plan, plan.layers)
    )
    largest = sum(held[-workers:])
    return largest if bound is None else min(largest, bound - process_memory(workers))


def peak_memory(plan: Plan, workers: int | None = None) -> int:
    """Predict the peak resident memory of a process in bytes, by default with this process's
    workers.
    """
    count = workers or plan.settings.workers
    return process_memory(count) + layer_budget(plan, workers)


def disk_bytes(plan: Plan) -> int:
    """Return the bytes of all weight files while the result is made."""
    _, state = state_layout(plan)
    heads = sum(
        task.source.tensors[key].nbytes for task in plan.tasks for key in task.head.values()
    )
    return heads + sum(
        info.nbytes for tensors in (*plan.files.values(), state) for info in tensors.values()
    )
