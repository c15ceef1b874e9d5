"""Run pieces of work in parallel: in processes on this machine, or on the nodes of a Ray
cluster.
"""

import logging
import multiprocessing
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .manifest import package_versions

log = logging.getLogger(__name__)

# The arguments for each piece of work, by its name in messages.
Work = Mapping[str, tuple[Any, ...]]
# The name of each piece, and what the function returned.
Results = Generator[tuple[str, Any], None, None]
# Makes the function that does the work, once for each worker.
Make = Callable[..., Callable[..., Any]]

_ANSWER_SECONDS = 20  # an address that does not answer in this time is refused
_START_SECONDS = 300  # a node whose CPUs or GPUs are not free in this time is left out
_TRIES = 3  # a piece of work that killed this many workers would kill the next one, too


def run_locally(work: Work, do: Callable[..., Any], processes: int) -> Results:
    """Yield names and results as processes finish them; they share the cores, and each sees one GPU
    if there are any.

    If a process is killed, the others end, too, and a ValueError is raised. All end when this
    generator is closed or the program is killed.
    """
    spawn = multiprocessing.get_context("spawn")
    gpus = spawn.SimpleQueue()
    for gpu in assign_gpus(processes):
        gpus.put(gpu)
    driver, lifeline = spawn.Pipe(duplex=False)
    threads = max(1, torch.get_num_threads() // processes)
    pool = ProcessPoolExecutor(
        processes,
        mp_context=spawn,
        initializer=_begin_process,
        initargs=(gpus, driver, threads),
    )
    # The lifeline is closed first, so that no process goes on after an error or an interrupt.
    with pool, lifeline:
        try:
            names = {pool.submit(do, *arguments): name for name, arguments in work.items()}
            for future in as_completed(names):
                yield names[future], future.result()
            # All work is done: the processes end by themselves, and give back what they hold.
            pool.shutdown()
        except BrokenProcessPool:
            raise ValueError(
                "a process was killed, perhaps for want of memory: run on with fewer --jobs"
            ) from None


def assign_gpus(processes: int) -> list[str | None]:
    """Return the GPU of each process, number i modulo n for process i, as CUDA_VISIBLE_DEVICES
    names it.
    """
    count = torch.cuda.device_count()
    if count == 0:
        return [None] * processes
    names = [str(number) for number in range(count)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        names = visible.split(",")
    return [names[i % count] for i in range(processes)]


def _begin_process(gpus: Any, driver: Any, threads: int) -> None:
    """Prepare a new process, which ends once the other end of ``driver`` is closed."""
    gpu = gpus.get()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # CUDA reads it when it is first used
    torch.set_num_threads(threads)
    # Ctrl-C reaches all processes of a terminal; the driver decides.
    signal.signal(signal.SIGINT, lambda *_: None)

    def end_with_driver() -> None:
        driver.poll(None)  # it waits until the other end is closed, by whatever death
        os._exit(1)

    threading.Thread(target=end_with_driver, daemon=True).start()


class Node(NamedTuple):
    """Where one worker runs: on all CPUs of a node, or on a GPU and its share of them."""

    name: str
    node_id: str
    cpus: int
    gpu: bool
    slots: int = 1  # pieces of work at a time


def connect(address: str | None) -> Any:
    """Connect to the Ray cluster at an address; None means the one this machine belongs to, or else
    a new one on it.
    """
    try:
        import ray
        import ray.util.scheduling_strategies
    except ModuleNotFoundError as error:
        raise ValueError(
            f"engine 'ray' needs Ray ({error}): pip install 'fusion-bench-nufilt[ray]'"
        ) from None
    if ray.is_initialized():
        return ray
    known_address = address
    if address in (None, "auto"):
        known_address = _recorded_address()
    host_and_port = re.fullmatch(r"(?:ray://)?\[?(.+?)]?:(\d{1,5})", known_address or "")
    if host_and_port is not None:
        # Ray itself would try for minutes.
        host = host_and_port[1]
        port = int(host_and_port[2])
        try:
            socket.create_connection((host, port), _ANSWER_SECONDS).close()
        except (OSError, OverflowError) as error:
            advice = "start one with `ray start --head`"
            if known_address != address:
                advice = (
                    "which RAY_ADDRESS or Ray's record names: unset the one, or clear the other "
                    "with `ray stop`"
                )
            raise ValueError(f"no Ray cluster at '{known_address}': {error}; {advice}") from error
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        if host_and_port is None:
            message = f"no Ray cluster at '{address}': {error}; start one with `ray start --head`"
            raise ValueError(message) from error
        message = f"Ray can't connect to what answers at '{known_address}': {error}"
        if _lacks_token(error):
            message = (
                f"the Ray cluster at '{known_address}' wants a token: set RAY_AUTH_MODE=token, "
                "with its token in ~/.ray/auth_token or RAY_AUTH_TOKEN"
            )
        raise ValueError(message) from error
    return ray


def _recorded_address() -> str | None:
    """Return the address of the cluster that Ray connects to where none is given; None if it starts
    a new one.
    """
    from ray._private.utils import read_ray_address

    recorded_address: str | None = os.environ.get("RAY_ADDRESS") or read_ray_address()
    return recorded_address


def _lacks_token(error: BaseException | None) -> bool:
    """Tell whether an error of Ray comes of a token that is missing or another."""
    while error is not None:
        if re.search(r"unauthenticated|auth\w*.?token|authentication", str(error), re.I):
            return True
        error = error.__cause__
    return False


def find_nodes(ray: Any, *, gpus: bool) -> list[Node]:
    """Return all nodes with CPUs, or all GPUs of all nodes; raise a ValueError if there are
    none.
    """
    workers: list[Node] = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        # A machine may be more than one node.
        name = f"node {node['NodeManagerHostname']} ({node['NodeID'][:8]})"
        num_cpus = int(node["Resources"].get("CPU", 0))
        num_gpus = int(node["Resources"].get("GPU", 0))
        if gpus and num_gpus > 0:
            cpus = max(1, num_cpus // num_gpus)
            workers += num_gpus * [Node(name, node["NodeID"], cpus, gpu=True)]
        elif not gpus and num_cpus > 0:
            workers.append(Node(name, node["NodeID"], num_cpus, gpu=False))
    if not workers:
        kind = "GPU" if gpus else "CPU"
        raise ValueError(f"the Ray cluster has no {kind}")
    return workers


class Worker:
    """The actor that works on a node; its errors name the node."""

    def start(self, node: Node, versions: dict[str, str], make: Make, *arguments: Any) -> str:
        """Make the function that does the work, and return the actor's id."""
        import ray

        self._node = node
        with self._named_errors():
            differing = []
            for name, installed in package_versions().items():
                if name in versions and installed != versions[name]:
                    differing.append(f"{name} {installed} where the driver has {versions[name]}")
            if differing:
                raise ValueError(
                    f"it has {', '.join(differing)}: install the same versions on all nodes"
                )
            torch.set_num_threads(node.cpus)
            self._do = make(*arguments)
        return str(ray.get_runtime_context().get_actor_id())

    def work(self, name: str, piece: tuple[Any, ...]) -> tuple[str, Any]:
        with self._named_errors():
            return name, self._do(*piece)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            raise ValueError(f"{self._node.name}: {error}") from None


def run_on_cluster(
    ray: Any, nodes: Sequence[Node], work: Work, make: Make, *arguments: Any
) -> Results:
    """Yield names and results as workers on the nodes finish them.

    ``make`` is called once on each node, with ``arguments``, and returns the function that does a
    piece of work there. Ray's own retries would repeat a call on the same actor, and wait forever
    for the CPUs or GPUs of a lost node. So the work of workers that died is given to the others
    here, after everything else.

    Raises:
        ValueError: work failed on a node, or it has other versions of the packages (the message
            names the node); no worker is left.
    """
    unfinished = dict(work)
    workers = _start(ray, nodes, make, arguments)
    try:
        for _ in range(_TRIES):
            if unfinished and not workers:
                raise ValueError(
                    "no worker is alive; the same command goes on where this run stopped"
                )
            actors = []
            for actor, node in workers.values():
                actors += node.slots * [actor]  # the pool gives each entry one piece at a time
            pool = ray.util.ActorPool(actors)
            for piece in unfinished.items():
                pool.submit(lambda actor, piece: actor.work.remote(*piece), piece)
            while pool.has_next():
                try:
                    name, result = pool.get_next_unordered()
                except ray.exceptions.RayTaskError as error:
                    raise _cause_of(ray, error) from error
                except ray.exceptions.RayError as error:
                    # A worker died, or a node that held a result.
                    actor_id = str(getattr(error, "actor_id", ""))
                    if actor_id in workers:
                        _, node = workers.pop(actor_id)
                        _warn(node, error)
                    continue
                del unfinished[name]
                yield name, result
        if unfinished:
            name = next(iter(unfinished))
            raise ValueError(f"{name}: {_TRIES} workers died of it, perhaps for want of memory")
    finally:  # after an error or an interrupt, no worker goes on
        for actor, _ in workers.values():
            ray.kill(actor)


def _start(
    ray: Any, nodes: Sequence[Node], make: Make, arguments: Sequence[Any]
) -> dict[str, tuple[Any, Node]]:
    """Start a worker on each node; return those that become ready, and their nodes, by actor id."""
    # Objects are sent to each node once, however many workers it has.
    shared = [ray.put(argument) for argument in arguments]
    starting = {}
    for node in nodes:
        on_this_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            node.node_id, soft=False
        )
        resources = {"num_gpus": 1} if node.gpu else {"num_cpus": node.cpus}
        actor = (
            ray.remote(Worker)
            .options(scheduling_strategy=on_this_node, max_concurrency=node.slots, **resources)
            .remote()
        )
        started = actor.start.remote(node, package_versions(), make, *shared)
        starting[started] = (actor, node)
    _, late = ray.wait(list(starting), num_returns=len(starting), timeout=_START_SECONDS)
    ready = {}
    for started, (actor, node) in starting.items():
        try:
            actor_id = ray.get(started, timeout=0)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            if started in late:
                _warn(node, f"its CPUs or GPUs were not free within {_START_SECONDS} s")
            else:
                _warn(node, error)
            ray.kill(actor)  # otherwise it would still take them once they are free
        else:
            ready[actor_id] = (actor, node)
    log.info("%d workers on the cluster", len(ready))
    return ready


def _cause_of(ray: Any, error: Any) -> Exception:
    """Return what stopped a piece of work; a result that found no room says what helps."""
    no_room = (ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError)
    if isinstance(error.cause, no_room):
        return ValueError(
            "a result is larger than what is free in a node's store for objects, and "
            "the disk to which Ray spills them is nearly full: make room there, or start the node "
            "with another `--temp-dir` or a larger `--object-store-memory`; the same command goes "
            "on where this run stopped"
        )
    cause: Exception = error.cause
    return cause


def _warn(node: Node, reason: object) -> None:
    first_line = str(reason).strip().partition("\n")[0]
    log.warning("%s: worker lost, others take its work: %s", node.name, first_line)
