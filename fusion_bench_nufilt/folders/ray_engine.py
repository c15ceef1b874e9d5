"""The layers of a merge on the nodes of a Ray cluster: this process hands them out, and it alone writes.

On NFS, two clients that write neighbouring tensors of a file can damage each other's, so that a file has one writer.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy
import torch

from fusion_bench_nufilt import cluster
from fusion_bench_nufilt.cluster import Place, Team, check_versions
from fusion_bench_nufilt.core.workers import side_by_side

from .architecture import Layer
from .checkpoint import some
from .engine import LayerMerger, Write
from .output import Record
from .plan import Plan


def places(plan: Plan) -> list[Place]:
    """A worker on every node of the cluster with a layer at a time for each CPU, or one for each of the GPUs.

    Raises:
        ValueError: no Ray, no cluster, or none with these.
    """
    found = cluster.places(cluster.connect(plan.settings.address), gpus=not plan.settings.on_cpu)
    return [dataclasses.replace(place, slots=place.cpus) for place in found] if plan.settings.on_cpu else found


class Worker:
    """Computes layers on a node, several at a time; Ray makes it there."""

    def prepare(self, versions: dict[str, str], place: Place, plan: Plan) -> None:
        """Take the driver's plan.

        Raises:
            ValueError: other versions of the packages, or other files, than the driver's.
        """
        check_versions(versions)
        if other := [checkpoint.name for checkpoint in plan.models.checkpoints if checkpoint.changed()]:
            raise ValueError(
                f"it has other files of {some(other)} than the driver: put them on a file system that all nodes share, "
                "or copy them with their times (rsync -a)"
            )
        torch.set_num_threads(place.slots)  # what memory is planned for
        settings = dataclasses.replace(plan.settings, engine="local", address=None)
        self._merger = LayerMerger(dataclasses.replace(plan, settings=settings))
        self._layers = {layer.slot: layer for layer in plan.layers}

    def merge(self, slots: Sequence[str]) -> list[tuple[Record, list[numpy.ndarray]]]:
        """Merge layers of one shape; return records, and bytes as arrays, which Ray moves without a copy."""
        torch.set_num_threads(1)  # in this thread; as on one machine, a layer is computed by one
        merged: list[tuple[Record, list[numpy.ndarray]]] = []

        def keep(record: Record, pieces: Sequence[memoryview]) -> None:
            merged.append((record, [numpy.frombuffer(piece, numpy.uint8) for piece in pieces]))

        self._merger.merge_batch([self._layers[slot] for slot in slots], keep)
        return merged


def merge_on_cluster(plan: Plan, batches: Sequence[list[Layer]], write: Write) -> Iterator[None]:
    """Merge batches of layers on all nodes of the plan's cluster, write each layer here, and yield for each batch.

    Raises:
        ValueError: There is no Ray or no cluster, or a node can't do what this process can; the message names it.
    """
    team = Team(cluster.connect(plan.settings.address), Worker, places(plan), plan)

    def merge(layers: list[Layer]) -> None:
        slots = [layer.slot for layer in layers]
        for record, pieces in team.call(f"layer '{slots[0]}'", "merge", slots):
            write(record, [piece.data for piece in pieces])

    with closing(team):  # while workers compute, this machine's own cores write what they gave before
        yield from side_by_side(merge, batches, team.slots + plan.settings.workers)
