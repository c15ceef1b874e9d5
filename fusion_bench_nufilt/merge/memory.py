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

from .engine import batch_size
from .plan import Plan
from .state_file import state_layout, state_tensors

#: On an accelerator, layers of equal shape are solved together within about this much memory.
BATCH_BYTES = 4 * 2**30
# Each worker's stack, allocator arena and buffers for matrix products: measured, and rounded up.
_WORKER_BYTES = 64 * 2**20
# The number by which glibc's malloc.h knows this parameter.
_M_MMAP_THRESHOLD = -3


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
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 4 * 2**20)


def layer_memory(plan: Plan, layer: Layer) -> int:
    """Return the bytes of main memory held while a layer is merged; on a GPU, it only passes
    through there.
    """
    if plan.settings.on_cpu:
        return solving_memory(plan, layer)
    return _stored_memory(plan, layer)


def solving_memory(plan: Plan, layer: Layer) -> int:
    """Return the bytes held where a layer is merged: its weights and state as read, and working
    memory.
    """
    wide = max(plan.method.itemsize, plan.dtype(layer.keys[0]).itemsize)
    return _stored_memory(plan, layer) + plan.method.working_bytes(layer.view.shape, wide)


def _stored_memory(plan: Plan, layer: Layer) -> int:
    numel = math.prod(layer.view.shape)
    base_itemsize = plan.dtype(layer.keys[0]).itemsize
    # One task's weight is held at a time. The factors of a LoRA are too thin to count.
    task_itemsize = 0
    for task in plan.tasks:
        if layer.param in task.keys:
            info = task.source.tensors[task.keys[layer.param]]
            task_itemsize = max(task_itemsize, FLOATS[info.dtype].itemsize)
    weights = (base_itemsize + task_itemsize) * numel
    # Nothing is kept in float32, so that the weight so far has the base's digits.
    if plan.method.is_stateless and plan.state is None and not plan.keeps_state:
        return weights + base_itemsize * numel
    return weights + sum(value.nbytes for _, _, value in state_tensors(plan, layer).values())


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
        # A batch passes through main memory as a whole on its way to an accelerator and back.
        if plan.settings.max_memory is not None:
            free = plan.settings.max_memory - process_memory(plan.settings.workers)
            size = max(1, min(size, free // layer_memory(plan, group[0])))
        yield from (group[i : i + size] for i in range(0, len(group), size))


def layer_budget(plan: Plan, workers: int | None = None) -> int:
    """Return the bytes that all layers in progress may take together, by default with this
    process's workers.
    """
    workers = workers or plan.settings.workers
    batch_bytes = []
    for batch in batches(plan, plan.layers):
        batch_bytes.append(sum(layer_memory(plan, layer) for layer in batch))
    # The worst case, in which the largest batches of all are in progress at a time.
    largest = sum(sorted(batch_bytes)[-workers:])
    bound = plan.settings.max_memory
    if bound is None:
        return largest
    return min(largest, bound - process_memory(workers))


def peak_memory(plan: Plan, workers: int | None = None) -> int:
    """Predict the peak resident memory of a process in bytes, by default with this process's
    workers.
    """
    count = workers or plan.settings.workers
    return process_memory(count) + layer_budget(plan, workers)


def disk_bytes(plan: Plan) -> int:
    """Return the bytes of all weight files while the result is made."""
    total = 0
    for task in plan.tasks:
        for key in task.head.values():
            total += task.source.tensors[key].nbytes
    _, state_file = state_layout(plan)
    for tensors in (*plan.files.values(), state_file):
        for info in tensors.values():
            total += info.nbytes
    return total
