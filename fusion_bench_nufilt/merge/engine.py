"""Merge layers several at a time, within a memory limit, in this process or on the nodes of a Ray
cluster.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from fusion_bench_nufilt.methods import State
from fusion_bench_nufilt.models.architecture import Layer
from fusion_bench_nufilt.nufilt import LowRank
from fusion_bench_nufilt.utils.devices import DevicePool, map_layers
from fusion_bench_nufilt.utils.failures import NoRoomError, room_for
from fusion_bench_nufilt.utils.tensors import FLOATS, is_finite

from .beside import state_tensors
from .forecast import batches, layer_budget, layer_memory, solving_memory
from .output import Record
from .plan import Plan
from .settings import BATCHES_PER_GPU
from .strength import measure_strengths


@dataclasses.dataclass
class MergedLayer:
    """A layer, and what the tasks so far made of it."""

    layer: Layer
    theta_0: Tensor  # (d_o, d_i)
    state: State
    record: Record


#: Takes a layer that is merged, and the function that computes its weight as the base stores it.
Take = Callable[[MergedLayer, Callable[[], Tensor]], object]


class LayerMerger:
    """Merges the layers of a plan in this process: one per thread on a CPU, batches of them on
    GPUs.

    Several batches are on a GPU at a time. One of them is solved while the others are read and
    written, so that the slowest of the three alone counts. A batch stays in one thread and on one
    CUDA stream, where its operations wait for no other batch's.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._budget = Budget(layer_budget(plan))
        gpus = [] if plan.settings.on_cpu else plan.settings.devices
        streams = [torch.cuda.Stream(device) for device in gpus * BATCHES_PER_GPU]
        self._streams = DevicePool(streams)
        self._room = {
            stream.device: Budget(torch.cuda.mem_get_info(stream.device)[0]) for stream in streams
        }
        self._turns = {stream.device: threading.Lock() for stream in streams}

    def merge(self, layers: list[Layer], take: Take) -> None:
        """Merge all tasks into some layers, and hand over each."""
        with self._budget.reserve(sum(layer_memory(self.plan, layer) for layer in layers)):
            if self.plan.settings.on_cpu:
                self._merge_on(torch.device("cpu"), layers, take)
                return
            on_gpu = sum(solving_memory(self.plan, layer) for layer in layers)
            with (
                self._streams.free() as stream,
                self._room[stream.device].reserve(on_gpu),
                torch.cuda.stream(stream),
            ):
                self._merge_on(stream.device, layers, take)

    def digests_read(self, layer: Layer) -> dict[str, str]:
        """Return the digests of what a layer is made from, by the model's role in the merge."""
        with self._budget.reserve(layer_memory(self.plan, layer)):
            started = self._start(layer, torch.device("cpu"))
            theta_0 = layer.view.part(started.theta_0)
            digests = started.record["read"]
            for number, task in enumerate(self.plan.tasks):
                if layer.param in task.params:
                    _, digests[f"task {number}"] = task.weight(layer.param, theta_0)
            return digests

    def _turn_on(self, device: torch.device) -> AbstractContextManager[object]:
        """Wait until no other batch is solved on a GPU; on a CPU, every thread solves."""
        return self._turns.get(device, nullcontext())

    def _merge_on(self, device: torch.device, layers: list[Layer], take: Take) -> None:
        """Merge layers on a device, or half of them at a time if it has no room for all."""
        try:
            merged = self._solve(layers, device)
        except NoRoomError:
            if len(layers) == 1:
                raise
        else:
            for layer in layers:
                done = merged.pop(layer.name)
                take(done, partial(self._weigh, done, device))
            return
        middle = len(layers) // 2
        self._merge_on(device, layers[:middle], take)
        self._merge_on(device, layers[middle:], take)

    def _solve(self, layers: list[Layer], device: torch.device) -> dict[str, MergedLayer]:
        merged: dict[str, MergedLayer] = {}
        for layer in layers:
            with room_for(f"'{layer.name}' {layer.view.shape}", device):
                merged[layer.name] = self._start(layer, device)
        for number in range(len(self.plan.tasks)):
            self._add_task(number, merged, device)
        return merged

    def _start(self, layer: Layer, device: torch.device) -> MergedLayer:
        """Read a layer of the base, and its state before the first task of this merge, to the
        layer's device.
        """
        plan = self.plan
        weight, sha = plan.base.read(key := layer.keys[0], device)
        weight = weight.to(plan.dtype(key))
        theta_0, (state, digests) = layer.view.matrix(weight), _read_state(plan, layer, device)
        read = {"base": sha, "state": digests} if state else {"base": sha}
        if plan.method.state_is_weight:
            state = {"weight": self._weight_so_far(layer, theta_0, state, read)}
        elif not state:
            state = plan.method.start(layer.name, theta_0)
        return MergedLayer(
            layer,
            theta_0,
            state,
            {"param": layer.param, "written": [], "read": read, "reports": []},
        )

    def _weight_so_far(
        self, layer: Layer, theta_0: Tensor, kept: State, read: dict[str, str]
    ) -> Tensor:
        """Return the merged weight before the first task, in the dtype in which it is kept."""
        plan, so_far, dtype = self.plan, theta_0, theta_0.dtype
        if plan.merged is not None:
            like = layer.view.part(theta_0)
            if not kept:
                weight, read["merged"] = plan.merged.weight(layer.param, like)
            else:
                weight = kept["weight"]
                info = plan.merged.source.tensors[plan.merged.keys[layer.param]]
                rounded = weight.to(FLOATS[info.dtype])
                stored, read["merged"] = plan.merged.weight(layer.param, rounded)
                assert isinstance(stored, Tensor)
                is_rounded = rounded.dtype.itemsize < weight.dtype.itemsize
                if is_rounded and not torch.equal(rounded, stored):
                    assert plan.state is not None
                    raise ValueError(
                        f"'{plan.state.source.name}' does not belong to the weights beside it: "
                        f"'{layer.name}' differs; remove it if the weights are right"
                    )
            assert isinstance(weight, Tensor)
            so_far = layer.view.matrix(weight)
        if kept or plan.keeps_state:
            dtype = torch.promote_types(dtype, torch.float32)
        return so_far.to(dtype)

    def _add_task(self, number: int, merged: dict[str, MergedLayer], device: torch.device) -> None:
        """Add a task to the states of the layers that it changes; an adapter may leave some
        unchanged.
        """
        task, step = self.plan.tasks[number], self.plan.first_step + number
        theta_t: dict[str, Tensor | LowRank] = {}
        for name, each in merged.items():
            if each.layer.param in task.params:
                with room_for(f"'{name}' {each.layer.view.shape}", device):
                    theta_0 = each.layer.view.part(each.theta_0)
                    new, each.record["read"][f"task {number}"] = task.weight(
                        each.layer.param, theta_0
                    )
                    new = task.at_strength(new, theta_0)
                    theta_t[name] = each.layer.view.matrix(new) if isinstance(new, Tensor) else new
        if not theta_t:
            return
        states = {name: merged[name].state for name in theta_t}
        pretrained = {name: merged[name].theta_0 for name in theta_t}
        add_each = self.plan.method.add_each
        with self._turn_on(device):
            for name, state, report in add_each(
                states,
                pretrained,
                theta_t,
                step=step,
                device=device,
                strength=self.plan.strengths[number],
            ):
                if not all(map(is_finite, state.values())):
                    too_large = (
                        f"the result is too large for {pretrained[name].dtype}, or its squares are"
                    )
                    raise ValueError(f"model '{task.source.name}', layer '{name}': {too_large}")
                merged[name].state = state
                merged[name].record["reports"].append({"step": step, **report})

    def _weigh(self, merged: MergedLayer, device: torch.device) -> Tensor:
        name, view = merged.layer.name, merged.layer.view
        # A state that is the weight has been solved.
        with nullcontext() if self.plan.method.state_is_weight else self._turn_on(device):
            states, pretrained = {name: merged.state}, {name: merged.theta_0}
            ((_, matrix),) = self.plan.method.weigh_each(states, pretrained, device=device)
        return view.part(matrix)


def _read_state(plan: Plan, layer: Layer, device: torch.device) -> tuple[State, str]:
    """Read the state of a layer that an earlier merge kept, and its digest; both are empty if it
    kept none.
    """
    kept, state, digests = plan.state, {}, ""
    for name, (_, param, like) in state_tensors(plan, layer).items():
        if kept is not None and param in kept.keys:
            value, found = kept.source.read(kept.keys[param], device)
            state[name], digests = value.to(like.dtype), digests + found
    return state, digests


class Budget:
    """A memory limit: threads wait until their reservations fit; one above the limit is granted on
    its own.
    """

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


def merge_layers(plan: Plan, layers: Sequence[Layer], take: Take) -> Iterator[int]:
    """Merge layers in this process, and hand over each; yield the number of those that were merged
    meanwhile.
    """
    found = list(batches(plan, layers))
    if found:
        measure_strengths(plan)
    merger = LayerMerger(plan)
    merged = map_layers(
        lambda batch: merger.merge(batch, take),
        found,
        plan.settings.devices[0],
        plan.settings.workers,
    )
    yield from (len(batch) for batch, _ in zip(found, merged, strict=True))
