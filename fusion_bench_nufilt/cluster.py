"""Work on the nodes of a Ray cluster: who works where, and what becomes of the work of those that die."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fusion_bench_nufilt.storage.versions import package_versions

log = logging.getLogger(__name__)

# A worker that is not ready by then waits for CPUs or GPUs that others hold.
_START_SECONDS = 300
# Of a piece of work; what kills so many workers will kill the next one, too.
_TRIES = 3


@dataclass(frozen=True)
class Place:
    """Where a worker is to run."""

    node: str  # for people
    node_id: str
    cpus: int
    gpu: bool
    slots: int = 1  # pieces of work at a time

    def options(self, ray: ModuleType) -> dict[str, Any]:
        """How Ray is to start it: there or nowhere."""
        where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(self.node_id, soft=False)
        needs = {"num_gpus": 1} if self.gpu else {"num_cpus": self.cpus}
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


def places(ray: ModuleType, *, gpus: bool) -> list[Place]:
    """One on every node with all of its CPUs, or one for each of its GPUs with a share of them.

    Raises:
        ValueError: the cluster has none of these.
    """
    kind, found = "GPU" if gpus else "CPU", []
    for node in ray.nodes():
        if (number := int(node["Resources"].get(kind, 0))) and node["Alive"]:
            name = f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"  # a machine may be more than one node
            count = number if gpus else 1
            cpus = max(1, int(node["Resources"].get("CPU", 1)) // count)
            found += count * [Place(name, node["NodeID"], cpus, gpus)]
    if not found:
        raise ValueError(f"the Ray cluster has no {kind}")
    return found


def check_versions(expected: dict[str, str]) -> None:
    """Refuse a worker whose packages are not the driver's.

    Raises:
        ValueError: names the packages.
    """
    mine = package_versions()
    if other := [name for name in expected if mine[name] != expected[name]]:
        told = ", ".join(f"{name} {mine[name]} where the driver has {expected[name]}" for name in other)
        raise ValueError(f"it has {told}: install the same versions on all nodes")


class Team:
    """Workers, each for as many pieces of work at a time as its place has slots.

    Args:
        ray: connected to the cluster.
        kind: class of the workers. Its ``prepare`` takes the driver's versions, the worker's place and ``arguments``.
        where: the places.
        arguments: for all workers.

    Raises:
        ValueError: a worker refuses to be prepared; names its node.
    """

    def __init__(self, ray: ModuleType, kind: type, where: Sequence[Place], *arguments: Any) -> None:
        self._ray = ray
        self._changed = threading.Condition()
        self._places: dict[Any, Place] = {}  # of all workers
        self._alive: set[Any] = set()
        self._free: list[Any] = []  # a worker once for each of its slots
        try:
            self._start(kind, where, [ray.put(argument) for argument in arguments])
        except BaseException:
            self.close()
            raise

    def _start(self, kind: type, where: Sequence[Place], arguments: list[Any]) -> None:
        ray, preparing = self._ray, {}
        remote = ray.remote(kind)
        for place in where:
            worker = remote.options(**place.options(ray)).remote()
            self._places[worker] = place
            self._alive.add(worker)
            preparing[worker.prepare.remote(package_versions(), place, *arguments)] = worker
        ray.wait(list(preparing), num_returns=len(preparing), timeout=_START_SECONDS)
        for prepared, worker in preparing.items():
            try:
                self._get(worker, prepared, timeout=0)
                self._free += self._places[worker].slots * [worker]
            except ray.exceptions.GetTimeoutError:
                self._lose(worker, f"its CPUs or GPUs were not free within {_START_SECONDS} s")
            except ray.exceptions.RayError as error:
                self._lose(worker, error)
        if not self._alive:
            raise ValueError("no worker could be started on the cluster; the warnings say why")
        log.info("%d workers on the cluster, %d pieces of work at a time", len(self._alive), self.slots)

    @property
    def slots(self) -> int:
        """Pieces of work at a time."""
        return sum(self._places[worker].slots for worker in self._alive)

    def call(self, what: str, method: str, *arguments: Any) -> Any:
        """Have the next free worker do a piece of work, and another one if it dies.

        Args:
            what: the work, for messages.
            method: of the workers.
            arguments: of the method.

        Raises:
            ValueError: the worker raises one or an OSError; names its node. Too many workers died.
        """
        for _ in range(_TRIES):
            worker = self._take()
            try:
                return self._get(worker, getattr(worker, method).remote(*arguments))
            except self._ray.exceptions.RayError as error:
                self._lose(worker, error)
            finally:
                self._give_back(worker)
        raise ValueError(f"{what}: {_TRIES} workers died of it, perhaps for want of memory")

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
                log.warning("node %s: worker lost, others take its work: %s", self._places[worker].node, reason)
                self._alive.discard(worker)
                self._free = [other for other in self._free if other is not worker]
                self._changed.notify_all()
        self._ray.kill(worker)

    def close(self) -> None:
        for worker in self._alive:
            self._ray.kill(worker)
