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
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
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
_LOOK_SECONDS = 30  # after this long without a result, a cluster must still have nodes
_GOING_ON = "the same command goes on where this run stopped"
_TRIES = 3  # a piece of work that killed this many processes would kill the next one, too


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


def connect(address: str | None) -> Any:
    """Connect to the Ray cluster at an address; None means the one this machine belongs to, or else
    a new one on it.
    """
    try:
        import ray
        from ray._private.utils import read_ray_address
    except ModuleNotFoundError as error:
        raise ValueError(
            f"engine 'ray' needs Ray ({error}): pip install 'fusion-bench-nufilt[ray]'"
        ) from None
    if ray.is_initialized():
        return ray
    known_address = address
    if address in (None, "auto"):
        known_address = os.environ.get("RAY_ADDRESS") or read_ray_address()
    try:
        host_and_port = re.fullmatch(r"(?:ray://)?\[?(.+?)]?:(\d{1,5})", known_address or "")
        if host_and_port is not None:
            # Ray itself would try for minutes.
            place = (host_and_port[1], int(host_and_port[2]))
            socket.create_connection(place, _ANSWER_SECONDS).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        remedy = "start one with `ray start --head`"
        if known_address != address:
            remedy = (
                "RAY_ADDRESS or Ray's record names it: unset the one, or clear the other with "
                "`ray stop`"
            )
        raise ValueError(
            f"no Ray cluster at '{known_address or address}' that takes this program: {error}; "
            f"{remedy}"
        ) from error
    return ray


class Slots(NamedTuple):
    """What a cluster has for pieces of work, each of which takes so many CPUs, or a GPU."""

    number: int
    cpus: int
    gpu: bool


def find_slots(ray: Any, *, gpus: bool, whole_nodes: bool = False) -> Slots:
    """Return a cluster's slots: its GPUs, its CPUs or, with ``whole_nodes``, its nodes, as if each
    had the CPUs of the smallest one; raise a ValueError if there are none.
    """
    number = 0
    cpus_of_slots = []
    for node in ray.nodes():
        num_cpus = int(node["Resources"].get("CPU", 0))
        num_gpus = int(node["Resources"].get("GPU", 0))
        slots = num_gpus if gpus else min(num_cpus, 1) if whole_nodes else num_cpus
        if node["Alive"] and slots > 0:
            number += slots
            cpus_of_slots.append(max(1, num_cpus // slots))
    if not number:
        kind = "GPU" if gpus else "CPU"
        raise ValueError(f"the Ray cluster has no {kind}")
    return Slots(number, min(cpus_of_slots), gpus)


def run_on_cluster(ray: Any, slots: Slots, work: Work, make: Make, *arguments: Any) -> Results:
    """Yield names and results as a cluster finishes them: Ray places the work, and gives that of a
    process or node that dies to another one.

    ``make`` is called in each process, with ``arguments``, and returns the function that does a
    piece of work there.

    Raises:
        ValueError: work failed on a node, or it has other versions of the packages (the message
            names the node); work killed all who did it; nothing is left that could do it.
    """
    resources = {"num_cpus": 0, "num_gpus": 1} if slots.gpu else {"num_cpus": slots.cpus}
    # A process does one piece after the other, also on a GPU.
    remote = ray.remote(
        max_retries=_TRIES - 1, max_calls=0, scheduling_strategy="SPREAD", **resources
    )
    do = remote(_do_piece)
    versions = package_versions()
    # Sent to each node once; in a list, so that a process reads it once.
    shared = [ray.put((make, arguments))]
    names = {}
    for name, piece in work.items():
        names[do.remote(shared, versions, slots.cpus, piece)] = name
    try:
        while names:
            finished, _ = ray.wait(list(names), timeout=_LOOK_SECONDS)
            if not finished:
                find_slots(ray, gpus=slots.gpu)  # Ray would wait for others forever
                continue
            name = names.pop(finished[0])
            try:
                result = ray.get(finished[0])
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, ray.exceptions.RayError):  # such as of a full disk
                    reason = str(error.cause).partition("\n")[0]  # Ray's own advice follows
                    raise ValueError(f"{name}: {reason}; {_GOING_ON}") from error
                raise error.cause from error
            except ray.exceptions.RayError as error:
                raise ValueError(
                    f"{name}: {_TRIES} processes died of it, perhaps for want of memory; "
                    f"{_GOING_ON}"
                ) from error
            del finished  # with which Ray keeps the result
            yield name, result
    finally:  # after an error or an interrupt, no process goes on
        for unfinished in names:
            ray.cancel(unfinished, force=True)


#: In a process of a cluster: the function that it made, by what it was made of.
_made: dict[str, Callable[..., Any]] = {}


def _do_piece(
    shared: list[Any], versions: Mapping[str, str], cpus: int, piece: tuple[Any, ...]
) -> Any:
    """Do a piece of work in a process of a cluster, whose errors name the node."""
    import ray

    try:
        key = shared[0].hex()
        if key not in _made:
            _check_versions(versions)
            torch.set_num_threads(cpus)
            make, arguments = ray.get(shared[0])
            _made.clear()
            _made[key] = make(*arguments)
        return _made[key](*piece)
    except (ValueError, OSError) as error:
        node_id = ray.get_runtime_context().get_node_id()
        # A machine may be more than one node.
        raise ValueError(f"node {socket.gethostname()} ({node_id[:8]}): {error}") from None


def _check_versions(of_driver: Mapping[str, str]) -> None:
    differing = []
    for name, installed in package_versions().items():
        if name in of_driver and installed != of_driver[name]:
            differing.append(f"{name} {installed} where the driver has {of_driver[name]}")
    if differing:
        raise ValueError(f"it has {', '.join(differing)}: install the same versions on all nodes")
