"""Merge the layers of a plan on the nodes of a Ray cluster.

Only the driver writes: on NFS, two clients that write neighbouring tensors of a file can damage
each other's.
"""

import dataclasses
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing

import numpy
from torch import Tensor

from fusion_bench_nufilt.models.source import format_names
from fusion_bench_nufilt.utils.cluster import Slots, connect, find_slots, run_on_cluster
from fusion_bench_nufilt.utils.devices import exact_products
from fusion_bench_nufilt.utils.heap import give_back_freed_memory
from fusion_bench_nufilt.utils.tensors import TensorInfo, raw_bytes

from .engine import Job, Worker, batches, memory_limit
from .kept_state import KeptState
from .layer_jobs import layer_jobs, machine_of
from .output import Record
from .plan import Plan

# The record of each layer, and its pieces in arrays of bytes, which Ray moves without a copy.
_Merged = list[tuple[Record, list[tuple[TensorInfo, numpy.ndarray]]]]


def slots_of(plan: Plan) -> Slots:
    """Return the slots of the plan's cluster, each of which merges a batch of layers at a time."""
    return find_slots(connect(plan.settings.address), gpus=not plan.settings.on_cpu)


def merge_on_cluster(
    plan: Plan,
    jobs: Sequence[Job],
    strengths: Sequence[float],
    write: Callable[[Record, Sequence[tuple[TensorInfo, memoryview]]], object],
) -> Generator[int, None, None]:
    """Do jobs of a plan on its cluster, and yield the number of layers that were written meanwhile.

    ``write`` takes a layer's record, and its pieces with their places.
    """
    # A run that goes on may have none left, for which no worker is started.
    if not jobs:
        return
    work = {}
    for batch in batches(jobs, machine_of(plan)):
        work[f"layer '{batch[0].name}'"] = ([job.name for job in batch],)
    ray = connect(plan.settings.address)
    slots = slots_of(plan)
    with closing(run_on_cluster(ray, slots, work, _make_merger, plan, strengths)) as results:
        for _, merged in results:
            # As they arrive: a driver that is killed has lost no more than the layers in progress.
            for record, pieces in merged:
                write(record, [(place, piece.data) for place, piece in pieces])
            yield len(merged)


def _make_merger(plan: Plan, strengths: Sequence[float]) -> Callable[[Sequence[str]], _Merged]:
    """Return the function that merges layers, by name, on a node, which must have the driver's
    files, with the tasks' strengths as the driver measured them.
    """
    # A worker reads at the offsets in the driver's headers: in other files, these are other bytes.
    other_names = []
    for checkpoint in plan.checkpoints:
        if not checkpoint.reopen():
            other_names.append(checkpoint.name)
    if other_names:
        raise ValueError(
            f"it has other files of {format_names(other_names)} than the driver: put them on a "
            "file system that all nodes share, or copy them"
        )
    give_back_freed_memory()
    settings = dataclasses.replace(plan.settings, engine="local", address=None)
    local_plan = dataclasses.replace(plan, settings=settings)
    all_jobs = layer_jobs(KeptState(local_plan), plan.layers, strengths, local_plan.places)
    jobs = {job.name: job for job in all_jobs}
    machine = machine_of(local_plan)
    worker = Worker(machine, memory_limit(all_jobs, machine))

    def merge(names: Sequence[str]) -> _Merged:
        results: _Merged = []

        def add(record: Record, pieces: Iterable[tuple[TensorInfo, Tensor]]) -> None:
            arrays = []
            for place, piece in pieces:
                arrays.append((place, numpy.frombuffer(raw_bytes(piece), numpy.uint8)))
            results.append((record, arrays))

        # As in map_layers: a node may be set to round products, as containers of NVIDIA's are.
        with exact_products:
            worker.do([jobs[name] for name in names], add)
        changed = [each.name for each in local_plan.checkpoints if each.is_changed()]
        if changed:
            raise ValueError(f"{format_names(changed)} was changed there during the run")
        return results

    return merge
