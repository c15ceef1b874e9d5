"""Merge layers several at a time, within a memory limit, in this process or on the nodes of a Ray cluster.

Only this process writes: on NFS, two clients that write neighbouring tensors of a file can damage each other's.
"""

import ctypes
import dataclasses
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import numpy
import torch
from torch import Tensor

from fusion_bench_nufilt.cluster import Node, connect, find_nodes, run_on_cluster
from fusion_bench_nufilt.core import LowRank
from fusion_bench_nufilt.core.failures import NoRoomError, room_for
from fusion_bench_nufilt.core.weights import is_finite
from fusion_bench_nufilt.core.workers import DevicePool, map_layers
from fusion_bench_nufilt.methods import State
from fusion_bench_nufilt.storage.tensors import FLOATS, TensorInfo, digest, raw

from .architecture import Layer
from .forecast import layer_budget, layer_memory, solving_memory
from .output import Record
from .plan import BATCHES_PER_GPU, Plan, state_layout, state_tensors
from .sources.checkpoint import some
from .sources.fp8 import Quantised

log = logging.getLogger(__name__)

#: Takes the record of a merged layer, and the bytes for each range in the record's ``written``.
Write = Callable[[Record, Sequence[memoryview]], None]
_Merged = list[tuple[Record, list[numpy.ndarray]]]  # layers, and their bytes in arrays, which Ray moves without a copy


@dataclasses.dataclass
class _Work:
    layer: Layer
    theta_0: Tensor  # (d_o, d_i)
    state: State
    record: Record


class LayerMerger:
    """Merges the layers of a plan in this process: one per thread on a CPU, batches of them on GPUs.

    Several batches are on a GPU at a time. One of them is solved while the others are read and written, so that the
    slowest of the three alone counts. A batch stays in one thread and on one CUDA stream, where its operations wait for
    no other batch's.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._budget = Budget(layer_budget(plan))
        gpus = [] if plan.settings.on_cpu else plan.settings.devices
        streams = [torch.cuda.Stream(device) for device in gpus * BATCHES_PER_GPU]
        self._streams = DevicePool(streams)
        self._room = {stream.device: Budget(torch.cuda.mem_get_info(stream.device)[0]) for stream in streams}
        self._turns = {stream.device: threading.Lock() for stream in streams}
        self._kept = state_layout(plan)[1] if plan.keeps_state else {}
        # By default, every thread keeps freed blocks of up to 32 MB in glibc, and a process of many threads then takes
        # twice what it uses.
        if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
            mallopt(-3, 4 * 2**20)  # M_MMAP_THRESHOLD: larger blocks go back to the system when freed

    def merge(self, layers: list[Layer], write: Write) -> None:
        with self._budget.reserve(sum(layer_memory(self.plan, layer) for layer in layers)):
            if self.plan.settings.on_cpu:
                self._merge_on(torch.device("cpu"), layers, write)
                return
            on_gpu = sum(solving_memory(self.plan, layer) for layer in layers)
            with self._streams.free() as stream, self._room[stream.device].reserve(on_gpu), torch.cuda.stream(stream):
                self._merge_on(stream.device, layers, write)

    def _turn_on(self, device: torch.device) -> AbstractContextManager[object]:
        """Wait until no other batch is solved on a GPU; on a CPU, every thread solves."""
        return self._turns.get(device, nullcontext())

    def _merge_on(self, device: torch.device, layers: list[Layer], write: Write) -> None:
        """Merge layers on a device, or half of them at a time if it has no room for all."""
        try:
            works = self._solve(layers, device)
        except NoRoomError:
            if len(layers) == 1:
                raise
        else:
            for layer in layers:
                work = works.pop(layer.name)
                write(work.record, self._finish(work, device))
            return
        middle = len(layers) // 2
        self._merge_on(device, layers[:middle], write)
        self._merge_on(device, layers[middle:], write)

    def _solve(self, layers: list[Layer], device: torch.device) -> dict[str, _Work]:
        works: dict[str, _Work] = {}
        for layer in layers:
            with room_for(f"'{layer.name}' {layer.view.shape}", device):
                works[layer.name] = self._start(layer, device)
        for number in range(len(self.plan.tasks)):
            self._add_task(number, works, device)
        return works

    def _start(self, layer: Layer, device: torch.device) -> _Work:
        """Read a layer of the base, and its state before the first task of this merge, to the layer's device."""
        plan = self.plan
        weight, sha = plan.base.read(key := layer.keys[0], device)
        weight = weight.to(plan.dtype(key))
        theta_0, (state, digests) = layer.view.matrix(weight), _read_state(plan, layer, device)
        read = {"base": sha, "state": digests} if state else {"base": sha}
        if plan.method.state_is_weight:
            state = {"weight": self._weight_so_far(layer, theta_0, state, read)}
        elif not state:
            state = plan.method.start(layer.name, theta_0)
        return _Work(layer, theta_0, state, {"slot": layer.slot, "written": [], "read": read, "reports": []})

    def _weight_so_far(self, layer: Layer, theta_0: Tensor, kept: State, read: dict[str, str]) -> Tensor:
        """Return the merged weight before the first task, in the dtype in which it is kept."""
        merged, so_far, dtype = self.plan.merged, theta_0, theta_0.dtype
        if merged is not None:
            rounded = layer.view.part(theta_0)
            if kept:
                info, exact = merged.checkpoint.tensors[merged.keys[layer.slot]], kept["weight"]
                rounded = info.rounded(exact) if isinstance(info, Quantised) else exact.to(FLOATS[info.dtype])
            weight, read["merged"] = merged.weight(layer.slot, rounded)
            assert isinstance(weight, Tensor)
            if self.plan.state is not None and kept:
                name = self.plan.state.checkpoint.name
                if not torch.equal(rounded, weight):
                    why = f"'{layer.name}' differs; remove it if the weights are right"
                    raise ValueError(f"'{name}' does not belong to the weights beside it: {why}")
                weight = exact
            so_far = layer.view.matrix(weight)
        return so_far.to(torch.promote_types(dtype, torch.float32) if self._kept else dtype)

    def _add_task(self, number: int, works: dict[str, _Work], device: torch.device) -> None:
        """Add a task to the states of the layers that it changes; an adapter may leave some unchanged."""
        task, step = self.plan.tasks[number], self.plan.first_step + number
        theta_t: dict[str, Tensor | LowRank] = {}
        for name, work in works.items():
            if work.layer.slot in task.slots:
                with room_for(f"'{name}' {work.layer.view.shape}", device):
                    theta_0 = work.layer.view.part(work.theta_0)
                    new, work.record["read"][f"task {number}"] = task.weight(work.layer.slot, theta_0)
                    new = task.at_strength(new, theta_0)
                    theta_t[name] = work.layer.view.matrix(new) if isinstance(new, Tensor) else new
        if not theta_t:
            return
        states = {name: works[name].state for name in theta_t}
        pretrained = {name: works[name].theta_0 for name in theta_t}
        add_each = self.plan.method.add_each
        with self._turn_on(device):
            for name, state, report, _ in add_each(states, pretrained, theta_t, step=step, device=device):
                if not all(map(is_finite, state.values())):
                    too_large = f"the result is too large for {pretrained[name].dtype}, or its squares are"
                    raise ValueError(f"model '{task.checkpoint.name}', layer '{name}': {too_large}")
                works[name].state = state
                works[name].record["reports"].append({"step": step, **report})

    def _finish(self, work: _Work, device: torch.device) -> list[memoryview]:
        """Return the bytes of a layer's state, if it is kept, and of its weights; note their places in the record."""
        layer = work.layer
        states, pretrained = {layer.name: work.state}, {layer.name: work.theta_0}
        # A state that is the weight has been solved.
        with nullcontext() if self.plan.method.state_is_weight else self._turn_on(device):
            ((_, matrix),) = self.plan.method.weigh_each(states, pretrained, device=device)
        plan, read = self.plan, work.record["read"]
        weight = plan.vocabulary.grown_layer(layer.slot, layer.view.part(matrix), read)
        kept = _state_to_keep(plan, layer, work.state) if self._kept else {}
        stored: list[tuple[TensorInfo, Tensor]] = [(self._kept[key], value.cpu()) for key, value in kept.items()]
        for key in layer.keys:
            place = plan.places[key]
            new = place.quantise(weight) if isinstance(place, Quantised) else [(place, weight.to(FLOATS[place.dtype]))]
            if not is_finite(new[-1][1]):  # the scale, if there is one: FP8 values are clamped
                raise ValueError(f"tensor '{key}': the merged weight is too large for {place.dtype}")
            stored += [(info, value.cpu()) for info, value in new]
        work.record["written"] = [(info.file, info.start, info.stop, digest(value)) for info, value in stored]
        return [raw(value) for _, value in stored]


def _read_state(plan: Plan, layer: Layer, device: torch.device) -> tuple[State, str]:
    """Read the state of a layer that an earlier merge kept, and its digest; both are empty if it kept none."""
    kept, state, digests = plan.state, {}, ""
    for name, (_, slot, like) in state_tensors(plan, layer).items():
        if kept is not None and slot in kept.keys:
            value, found = kept.checkpoint.read(kept.keys[slot], device)
            state[name], digests = value.to(like.dtype), digests + found
    return state, digests


def _state_to_keep(plan: Plan, layer: Layer, state: State) -> dict[str, Tensor]:
    """Return the tensors of a layer's state by their keys in the file, whose shapes and dtypes they must have."""
    if plan.method.state_is_weight:
        state = {"weight": layer.view.part(state["weight"]).to(torch.float32)}
    tensors = {}
    for name, (key, _, like) in state_tensors(plan, layer).items():
        if (value := state[name]).shape != like.shape or value.dtype != like.dtype:
            after, before = (f"{each.dtype} {tuple(each.shape)}" for each in (value, like))
            what = f"'{name}' of its state is {after} after the last task and was {before} before the first"
            raise ValueError(f"method {plan.method.name}, layer '{layer.name}': {what}")
        tensors[key] = value
    return tensors


class Budget:
    """A memory limit: threads wait until their reservations fit; one above the limit is granted on its own."""

    def __init__(self, nbytes: int) -> None:
        self._bound, self._used = nbytes, 0
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + nbytes <= self._bound)
            self._used += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()


def cluster_nodes(plan: Plan) -> list[Node]:
    """Return the nodes of the plan's cluster, with a slot for each CPU, or its GPUs, with one slot each."""
    found = find_nodes(connect(plan.settings.address), gpus=not plan.settings.on_cpu)
    return [node._replace(slots=node.cpus) for node in found] if plan.settings.on_cpu else found


def merge_layers(plan: Plan, batches: Sequence[list[Layer]], write: Write) -> Iterator[None]:
    """Merge batches of layers here or on the plan's cluster, write each layer here, and yield after each batch."""
    settings = plan.settings
    if settings.engine == "local":
        merge = partial(LayerMerger(plan).merge, write=write)
        yield from map_layers(merge, batches, settings.devices[0], settings.workers)
        return
    work = {f"layer '{layers[0].slot}'": ([layer.slot for layer in layers],) for layers in batches}
    for _, merged in run_on_cluster(connect(settings.address), cluster_nodes(plan), work, _make_merger, plan):
        for record, pieces in merged:
            write(record, [piece.data for piece in pieces])
        yield


def _make_merger(plan: Plan) -> Callable[[Sequence[str]], _Merged]:
    """Return the function that merges the layers of some slots on a node, which must have the driver's files."""
    if other := some(plan.changed()):
        remedy = "put them on a file system that all nodes share, or copy them with their times (rsync -a)"
        raise ValueError(f"it has other files of {other} than the driver: {remedy}")
    settings = dataclasses.replace(plan.settings, engine="local", address=None)
    merger = LayerMerger(dataclasses.replace(plan, settings=settings))
    layers = {layer.slot: layer for layer in plan.layers}

    def merge(slots: Sequence[str]) -> _Merged:
        torch.set_num_threads(1)  # as on one machine, one thread computes a layer
        merged: list[tuple[Record, Sequence[memoryview]]] = []
        merger.merge([layers[slot] for slot in slots], lambda *layer: merged.append(layer))
        return [(record, [numpy.frombuffer(piece, numpy.uint8) for piece in pieces]) for record, pieces in merged]

    return merge
