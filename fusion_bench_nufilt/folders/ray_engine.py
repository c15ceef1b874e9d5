"""The layers of a merge on the nodes of a Ray cluster: this process hands them out, and it alone writes.

On NFS, two clients that write neighbouring tensors of a file can damage each other's, so that a file has one writer.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy
import torch

from fusion_bench_nufilt.cluster import Node, connect, find_nodes, run_on_cluster

from .architecture import Layer
from .checkpoint import some
from .engine import LayerMerger, Write
from .output import Record
from .plan import Plan

_Merged = list[tuple[Record, list[numpy.ndarray]]]  # layers, and their bytes in arrays, which Ray moves without a copy


def cluster_nodes(plan: Plan) -> list[Node]:
    """Return the nodes of the plan's cluster with a layer at a time for each CPU, or all of its GPUs with one each.

    Raises:
        ValueError: There is no Ray, no cluster, or none with these.
    """
    found = find_nodes(connect(plan.settings.address), gpus=not plan.settings.on_cpu)
    return [node._replace(slots=node.cpus) for node in found] if plan.settings.on_cpu else found


def merge_on_cluster(plan: Plan, batches: Sequence[list[Layer]], write: Write) -> Iterator[None]:
    """Merge batches of layers on the nodes of the plan's cluster, write each layer here, and yield for each batch.

    Raises:
        ValueError: There is no Ray or no cluster, or a node can't do what this process can; the message names it.
    """
    ray, nodes = connect(plan.settings.address), cluster_nodes(plan)
    work = {f"layer '{layers[0].slot}'": ([layer.slot for layer in layers],) for layers in batches}
    for _, merged in run_on_cluster(ray, nodes, work, _make_merger, plan):
        for record, pieces in merged:
            write(record, [piece.data for piece in pieces])
        yield


def _make_merger(plan: Plan) -> Callable[[Sequence[str]], _Merged]:
    """Return what merges the layers in some slots on a node.

    Raises:
        ValueError: The node has other files than the driver.
    """
    if other := [checkpoint.name for checkpoint in plan.models.checkpoints if checkpoint.changed()]:
        raise ValueError(
            f"it has other files of {some(other)} than the driver: put them on a file system that all nodes share, "
            "or copy them with their times (rsync -a)"
        )
    settings = dataclasses.replace(plan.settings, engine="local", address=None)
    merger = LayerMerger(dataclasses.replace(plan, settings=settings))
    layers = {layer.slot: layer for layer in plan.layers}

    def merge(slots: Sequence[str]) -> _Merged:
        torch.set_num_threads(1)  # in this thread; as on one machine, a layer is computed by one
        merged: _Merged = []

        def keep(record: Record, pieces: Sequence[memoryview]) -> None:
            merged.append((record, [numpy.frombuffer(piece, numpy.uint8) for piece in pieces]))

        merger.merge_batch([layers[slot] for slot in slots], keep)
        return merged

    return merge
