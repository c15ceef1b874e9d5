"""The layers of a merge on the nodes of a Ray cluster: this process hands them out, and it alone writes.

On NFS, two clients that write neighbouring tensors of a file can damage each other's, so that a file has one writer.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy
import torch

from fusion_bench_nufilt.core.workers import side_by_side

from .architecture import Layer
from .checkpoint import some
from .engine import Fused, LocalEngine
from .manifest import versions
from .plan import Plan

log = logging.getLogger(__name__)

# A worker that is not ready by then waits for CPUs or GPUs that others hold.
_START_SECONDS = 180
# Of a batch of layers; what kills so many workers will kill the next one, too.
_TRIES = 3


@dataclass(frozen=True)
class Place:
    """Where a worker is to run."""

    node: str  # for people
    node_id: str
    slots: int  # batches of layers at a time
    gpu: bool

    def options(self, ray: ModuleType) -> dict[str, Any]:
        """How Ray is to start it: there or nowhere."""
        where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(self.node_id, soft=False)
        needs = {"num_gpus": 1} if self.gpu else {"num_cpus": self.slots}
        return {"scheduling_strategy": where, "max_concurrency": self.slots, **needs}


def connect(address: str | None) -> ModuleType:
    """Ray, connected to a cluster.

    Args:
        address: of the cluster; None: the one that this machine belongs to, or else a new one on this machine alone.

    Raises:
        ValueError: Ray is not installed, or there is no cluster; says what to do.
    """
    try:
        import ray
        import ray.util.scheduling_strategies
    except ModuleNotFoundError as error:
        raise ValueError(f"engine 'ray' needs Ray ({error}): pip install 'fusion-bench-nufilt[ray]'") from None
    if not ray.is_initialized():
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError) as error:
            raise ValueError(f"no Ray cluster at '{address}': {error}; start one with `ray start --head`") from error
    return ray


def places(plan: Plan, ray: ModuleType) -> list[Place]:
    """A worker on every node with a slot for each of its CPUs, or one for each of its GPUs.

    Raises:
        ValueError: the cluster has none of these.
    """
    kind = "CPU" if plan.on_cpu else "GPU"
    found = []
    for node in ray.nodes():
        number = int(node["Resources"].get(kind, 0)) if node["Alive"] else 0
        workers, slots = (min(number, 1), number) if plan.on_cpu else (number, 1)
        name = f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"  # a machine may be more than one node
        found += workers * [Place(name, node["NodeID"], slots, gpu=not plan.on_cpu)]
    if not found:
        raise ValueError(f"the Ray cluster has no {kind}")
    return found


class Worker:
    """Computes layers on a node, several at a time; Ray makes it there."""

    def prepare(self, expected: dict[str, str], plan: Plan, slots: int) -> None:
        """Take the driver's plan.

        Raises:
            ValueError: other versions of the packages, or other files, than the driver's.
        """
        mine = versions()
        if other := [name for name, version in expected.items() if mine[name] != version]:
            told = ", ".join(f"{name} {mine[name]} where the merge has {expected[name]}" for name in other)
            raise ValueError(f"it has {told}: install the same versions on all nodes")
        if other := [checkpoint.name for checkpoint in plan.checkpoints if checkpoint.changed()]:
            raise ValueError(
                f"it has other files of {some(other)} than the merge: put them on a file system that all nodes share, "
                "or copy them with their times (rsync -a)"
            )
        torch.set_num_threads(slots)  # what memory is planned for
        settings = dataclasses.replace(plan.settings, engine="local", address=None)
        self._engine = LocalEngine(dataclasses.replace(plan, settings=settings))
        self._layers = {layer.slot: layer for layer in plan.layers}

    def fuse(self, slots: Sequence[str]) -> list[tuple[dict[str, Any], list[numpy.ndarray]]]:
        """:meth:`LocalEngine.fuse`, in arrays of bytes, which Ray moves without a copy."""
        torch.set_num_threads(1)  # in this thread; as on one machine, a layer is computed by one
        fused = self._engine.fuse([self._layers[slot] for slot in slots])
        return [(record, [numpy.frombuffer(piece, numpy.uint8) for piece in pieces]) for record, pieces in fused]


class RayEngine:
    """Workers on all nodes of a cluster.

    Args:
        plan: whose settings name the cluster.

    Raises:
        ValueError: no Ray, no cluster, or a node that can't do what this process can; names it.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._changed = threading.Condition()
        self._places: dict[Any, Place] = {}  # of all workers
        self._alive: set[Any] = set()
        self._free: list[Any] = []  # a worker once for each of its slots
        self._ray = connect(plan.settings.address)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        ray = self._ray
        remote, preparing, plan = ray.remote(Worker), {}, ray.put(self.plan)
        for place in places(self.plan, ray):
            worker = remote.options(**place.options(ray)).remote()
            self._places[worker] = place
            self._alive.add(worker)
            preparing[worker.prepare.remote(versions(), plan, place.slots)] = worker
        ray.wait(list(preparing), num_returns=len(preparing), timeout=_START_SECONDS)
        for prepared, worker in preparing.items():
            try:
                self._get(worker, prepared, timeout=0)
                self._free += self._places[worker].slots * [worker]
            except ray.exceptions.GetTimeoutError:
                self._lose(worker, f"its CPUs or GPUs were not free within {_START_SECONDS} s")
            except ray.exceptions.RayError as error:
                self._lose(worker, error)
        log.info("%d workers compute %d batches of layers at a time", len(self._alive), len(self._free))

    def side_by_side(self, do: Callable[[Any], None], jobs: Sequence[Any]) -> Iterator[None]:
        # While workers compute, this machine's own cores write what they gave before.
        return side_by_side(do, jobs, len(self._free) + self.plan.workers)

    def fuse(self, layers: list[Layer]) -> Iterator[Fused]:
        for record, pieces in self._compute([layer.slot for layer in layers]):
            yield record, [piece.data for piece in pieces]

    def _compute(self, slots: list[str]) -> list[tuple[dict[str, Any], list[numpy.ndarray]]]:
        for _ in range(_TRIES):
            worker = self._take()
            try:
                return self._get(worker, worker.fuse.remote(slots))
            except self._ray.exceptions.RayError as error:
                self._lose(worker, error)
            finally:
                self._give_back(worker)
        raise ValueError(f"layer '{slots[0]}': {_TRIES} workers died of it, perhaps for want of memory")

    def _get(self, worker: Any, result: Any, timeout: float | None = None) -> Any:
        """What a worker returns; what it refuses is refused with its node's name."""
        try:
            return self._ray.get(result, timeout=timeout)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ValueError | OSError):
                raise ValueError(f"node {self._places[worker].node}: {error.cause}") from None
            raise RuntimeError(str(error)) from None  # with the worker's own trace

    def _take(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._free or not self._alive)
            if not self._alive:
                raise ValueError("no worker lives any more; the same command goes on where this run stopped")
            return self._free.pop()

    def _give_back(self, worker: Any) -> None:
        with self._changed:
            if worker in self._alive:
                self._free.append(worker)
                self._changed.notify()

    def _lose(self, worker: Any, why: object) -> None:
        """Go on without a worker."""
        with self._changed:
            if worker in self._alive:
                reason = str(why).strip().partition("\n")[0]
                log.warning("node %s: worker lost, others take its layers: %s", self._places[worker].node, reason)
                self._alive.discard(worker)
                self._free = [other for other in self._free if other is not worker]
                self._changed.notify_all()
        self._ray.kill(worker)

    def close(self) -> None:
        for worker in self._alive:
            self._ray.kill(worker)
