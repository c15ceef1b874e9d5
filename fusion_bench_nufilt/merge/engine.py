"""The scheduler of all merges: layers several at a time, within a memory limit, in this process.

What is merged, and where it is read from, a :class:`LayerReader` says; how, a
:class:`fusion_bench_nufilt.methods.LayerMethod`. Neither knows of threads, devices or failures.
"""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter, methodcaller
from threading import Condition, Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusion_bench_nufilt.methods.base import LayerMethod, Measures, State, block_bytes
from fusion_bench_nufilt.methods.options import BATCHES_PER_GPU
from fusion_bench_nufilt.methods.task_vector import TaskVector
from fusion_bench_nufilt.models.layers import Layer
from fusion_bench_nufilt.models.model import scaled_update
from fusion_bench_nufilt.nufilt.low_rank import LowRank
from fusion_bench_nufilt.nufilt.noise import rounding_of, summed_rounding
from fusion_bench_nufilt.utils.devices import (
    DeviceOutOfMemoryError,
    DevicePool,
    classify_error,
    map_layers,
    oom_as_error,
    warn_once,
)
from fusion_bench_nufilt.utils.tensors import (
    is_finite,
    replace_rows,
    select_rows,
    stack,
    to_compute_dtype,
)

log = logging.getLogger(__name__)

CPU = torch.device("cpu")

#: Of a task's update in a layer. Cubes of what is outside leave float32's range, 1e-38 to 3e38.
NORMS = (1e-12, 1e12)

_R = TypeVar("_R")


@dataclass
class MergedLayer:
    """A layer, and what the tasks so far made of it."""

    layer: Layer
    theta_0: Tensor  # (d_o, d_i)
    state: State  # of this layer alone
    record: Any  # a dict with the "reports" of its steps
    rounding: float = field(default=0.0, kw_only=True)
    """What rounding has added to its update so far, see :mod:`fusion_bench_nufilt.nufilt.noise`."""


@dataclass
class _Batch:
    """Layers of one shape that are merged together on a device."""

    merged: list[MergedLayer]
    base: Tensor  # (n, d_o, d_i)
    state: State  # of all layers
    device: torch.device

    @property
    def layers(self) -> list[Layer]:
        return [merged_layer.layer for merged_layer in self.merged]

    def part(self, rows: list[int]) -> "_Batch":
        """Return some of the layers, with copies of their rows."""
        merged = [self.merged[row] for row in rows]
        state = {key: select_rows(value, rows) for key, value in self.state.items()}
        return _Batch(merged, select_rows(self.base, rows), state, self.device)


@dataclass
class _TaskWeights:
    """A task's weights of some layers of a batch, or factors of one rank."""

    rounding: float  # what rounding adds to their update
    rounding_before: float  # what it has added to that of the tasks before
    rows: list[int]  # of the layers in the batch
    weights: list[Tensor | LowRank]


#: Takes a layer that is merged, and the function that computes its weight as the base stores it.
OnLayer = Callable[[MergedLayer, Callable[[], Tensor]], object]


#: A shape ``(d_o, d_i)``, and dtypes.
Form = tuple[tuple[int, int], tuple[torch.dtype, ...]]


class LayerReader(ABC):
    """Reads the layers of a merge, and knows how much memory they take."""

    method: LayerMethod
    devices: list[torch.device]
    workers: int
    """The number of batches of layers in progress."""
    batch_bytes: int
    """On an accelerator, layers are solved together within about this much memory."""
    task_names: Sequence[str]
    first_step: int
    """The number of the first task in the stream, from 1."""

    @property
    @abstractmethod
    def memory_limit(self) -> int:
        """The bytes of main memory that all layers in progress may take together."""

    @property
    @abstractmethod
    def strengths(self) -> Sequence[float]:
        """The strength of each task."""

    @abstractmethod
    def form(self, layer: Layer) -> Form:
        """Return what layers have in common that are merged together: the shape in which that is
        done, and the dtypes of the base and of what else is stacked.
        """

    @abstractmethod
    def memory(self, layer: Layer) -> int:
        """Return the bytes of main memory held while a layer is merged."""

    @abstractmethod
    def solving_memory(self, layer: Layer) -> int:
        """Return the bytes held on the device where a layer is merged."""

    def working_memory(self, shape: tuple[int, int], itemsize: int) -> int:
        """Return the bytes that a layer takes while it is merged, beside its weights and state."""
        working = self.method.working_bytes(shape, itemsize)
        wide = itemsize * math.prod(shape)
        if self.devices[0].type != "cpu":
            # A GPU subtracts all rows at once.
            return working + 3 * wide
        if self.widens_tasks:
            # The base's weights, the task's and what becomes of them, and then the last of these.
            return max(working, 2 * wide + block_bytes(shape, itemsize)) + wide
        return working

    @cached_property
    def widens_tasks(self) -> bool:
        """Whether some task's weights are wide as a whole, with the base's and what becomes of
        them.
        """
        return any(coefficient != 1 for coefficient in self.coefficients)

    @abstractmethod
    def read(self, layer: Layer, device: torch.device) -> MergedLayer:
        """Read a layer of the base, and its state before the first task, to a device."""

    @abstractmethod
    def read_task(self, number: int, merged: MergedLayer) -> Tensor | LowRank | None:
        """Read a task's weight of a layer as it is stored, or the factors of its update, to the
        device of ``merged``; None if it has the layer as it is in the base.
        """

    @property
    def coefficients(self) -> Sequence[float]:
        """What the update of each task is multiplied by in the merge."""
        return [1.0] * len(self.task_names)

    def rounding_of_base(self, merged: MergedLayer) -> float:
        """Return the rounding of the base's values of a layer, where they have been rounded as they
        were read, else 0: a task begins with what is stored.
        """
        return 0.0

    def rounding_before(self, merged: MergedLayer) -> float:
        """Return what rounding has added to a layer in earlier merges: where nobody recorded it, as
        much as if each task had the digits of the model so far, or the base's.
        """
        if self.num_tasks_before == 0:
            return 0.0
        so_far = merged.state.get("weight", merged.theta_0)
        rounding = max(rounding_of(so_far), rounding_of(merged.theta_0))
        # Of the tasks, and of the base in all of them alike.
        return self.num_tasks_before * (self.num_tasks_before + 1) * rounding

    @property
    def num_tasks_before(self) -> int:
        """The number of tasks that were merged into the model so far."""
        return self.first_step - 1

    def weighted(
        self, number: int, merged: MergedLayer, weight: Tensor | LowRank
    ) -> Tensor | LowRank:
        """Return what :meth:`read_task` returned with its update times the task's coefficient."""
        return scaled_update(weight, merged.theta_0, self.coefficients[number])

    def as_stored(self, merged: MergedLayer, weight: Tensor) -> Tensor:
        """Return the merged weight of a layer in the form in which the base has it."""
        return weight

    def batches(self, layers: Sequence[Layer]) -> list[list[Layer]]:
        """Return the layers that are merged together: one on a CPU, else several of one form."""
        groups = defaultdict(list)
        for layer in layers:
            groups[self.form(layer)].append(layer)
        batches = []
        for group in groups.values():
            size = self.most_together(group[0])
            batches += [group[first : first + size] for first in range(0, len(group), size)]
        return batches

    def most_together(self, layer: Layer) -> int:
        """Return the most layers like this one in a batch."""
        shape, dtypes = self.form(layer)
        itemsize = max(4, dtypes[0].itemsize)
        return batch_size(self.method, shape, itemsize, self.devices[0], self.batch_bytes)


class LayerMerger:
    """Merges layers in this process: one per thread on a CPU, batches of them on GPUs.

    Several batches are on a GPU at a time. One of them is solved while the others are read and
    written, so that the slowest of the three alone counts. A batch stays in one thread and on one
    CUDA stream, where its operations wait for no other batch's.
    """

    def __init__(self, reader: LayerReader) -> None:
        self.reader = reader
        # Before any thread merges a layer, so that all of them measure strengths.
        self._strengths = reader.strengths
        self._budget = Budget(reader.memory_limit)
        devices = [device for device in reader.devices if device.type == "cuda"]
        for device in devices:
            # The streams below do not wait for what the caller left to do on its own.
            torch.cuda.current_stream(device).synchronize()
        streams = [torch.cuda.Stream(device) for device in devices * BATCHES_PER_GPU]
        self._streams = DevicePool(streams)
        # A stream knows the number of its GPU, which the device "cuda" leaves open.
        self._gpus = list(dict.fromkeys(stream.device for stream in streams))
        # What is free, and not all there is: other processes may use the GPU, too.
        self._room = {gpu: Budget(torch.cuda.mem_get_info(gpu)[0]) for gpu in self._gpus}
        self._turns = {gpu: Lock() for gpu in self._gpus}

    @torch.no_grad()
    def merge(self, layers: list[Layer], on_layer: OnLayer) -> int:
        """Merge all tasks into some layers of one shape, hand over each, and return their number.

        They are merged together, or half of them at a time where that fails.
        """
        reader = self.reader
        with ExitStack() as held:
            # Memory, stream, room: in one order in all threads, so that no two wait for each other.
            held.enter_context(self._budget.reserve(sum(map(reader.memory, layers))))
            device = reader.devices[0]
            if self._gpus:
                stream = held.enter_context(self._streams.free())
                device = stream.device
                on_gpu = sum(map(reader.solving_memory, layers))
                held.enter_context(self._room[device].reserve(on_gpu))
                held.enter_context(torch.cuda.stream(stream))
            waiting = deque([layers])
            while waiting:
                together = waiting.popleft()
                try:
                    # A stack fails as a whole, though one layer may be the cause.
                    merged = self._solve(together, device)
                except (RuntimeError, DeviceOutOfMemoryError) as error:
                    if len(together) == 1 or classify_error(error) is None:
                        raise
                    self._log_halving(together, device, error)
                    middle = len(together) // 2
                    # extendleft reverses what it is given, so that the first half comes next.
                    waiting.extendleft([together[middle:], together[:middle]])
                    continue
                for merged_layer in merged:
                    on_layer(merged_layer, partial(self._merged_weight, merged_layer, device))
                # Else one half would be held in memory while the other is solved.
                del merged
            if self._gpus:
                stream.synchronize()  # the caller reads the results on another stream
        return len(layers)

    def _log_halving(self, layers: Sequence[Layer], device: torch.device, error: Exception) -> None:
        warn_once(
            "device '%s', %d layers of shape %s together: %s; halves take over, which changes "
            "them by rounding",
            device,
            len(layers),
            layers[0].view.shape,
            classify_error(error),
        )

    def _solve(self, layers: Sequence[Layer], device: torch.device) -> list[MergedLayer]:
        """Read layers of one shape to a device, and add all tasks to their states."""
        batch = self._read(layers, device)
        for number in range(len(self._strengths)):
            for task in self._read_task(number, batch):
                self._add_task(number, batch, task)
        for key, value in batch.state.items():
            for layer, layer_value in zip(batch.merged, value, strict=True):
                layer.state[key] = layer_value
        for layer in batch.merged:
            layer.record["rounding"] = layer.rounding
        return batch.merged

    def _read(self, layers: Sequence[Layer], device: torch.device) -> _Batch:
        """Read layers of the base, and their states before the first task, as one batch."""
        merged: list[MergedLayer] = []
        for layer in layers:
            with oom_as_error(_label(layer), device):
                merged_layer = self.reader.read(layer, device)
            merged_layer.rounding = self.reader.rounding_before(merged_layer)
            merged.append(merged_layer)
        base = _stack([layer.theta_0 for layer in merged])
        state = {key: _stack([layer.state[key] for layer in merged]) for key in merged[0].state}
        # A layer has its rows of the stack, and not what they are copies of: none is held twice.
        for merged_layer, theta_0 in zip(merged, base, strict=True):
            merged_layer.theta_0 = theta_0
            merged_layer.state = {}
        return _Batch(merged, base, state, device)

    def _read_task(self, number: int, batch: _Batch) -> list[_TaskWeights]:
        """Return a task's weights of the layers that it changes, by what is added together."""
        # An adapter may leave a layer as it is, or have another rank there.
        groups: dict[tuple[float, float, int | None], _TaskWeights] = {}
        for row, layer in enumerate(batch.merged):
            with oom_as_error(_label(layer.layer), batch.device):
                weight = self.reader.read_task(number, layer)
            if weight is None:
                continue
            # Factors have not been rounded to the digits of a weight.
            rounding = 0.0
            if isinstance(weight, Tensor):
                of_values = max(rounding_of(weight), self.reader.rounding_of_base(layer))
                # The task's own and the base's, at the task's coefficient.
                rounding = 2 * self.reader.coefficients[number] ** 2 * of_values
            weight = self.reader.weighted(number, layer, weight)
            if isinstance(weight, LowRank) and not self.reader.method.supports_low_rank:
                weight = to_compute_dtype(layer.theta_0) + weight.product()
            rank = weight.rank if isinstance(weight, LowRank) else None
            before = layer.rounding
            key = (rounding, before, rank)
            group = groups.setdefault(key, _TaskWeights(rounding, before, [], []))
            layer.rounding = summed_rounding(before, rounding)
            group.rows.append(row)
            group.weights.append(weight)
        return list(groups.values())

    def _add_task(self, number: int, batch: _Batch, task: _TaskWeights) -> None:
        """Add a task to the states of its rows of a batch, with a report for each; its weights are
        taken out of it.
        """
        rows = task.rows
        # A part is copied, which the usual case, a task with all the layers, does without.
        part = batch
        if len(rows) < len(batch.merged):
            part = batch.part(rows)
        layers = part.layers
        began = time.perf_counter()
        update = partial(self._update, number, part, task)
        with self._turn_on(batch.device):
            after, measures = self._solved(update, layers, batch.device)
            # A solver may have needed float64.
            after = {key: value.to(part.state[key].dtype) for key, value in after.items()}
            # Reading them waits for an accelerator.
            columns = {key: values.tolist() for key, values in measures.items()}
        seconds = (time.perf_counter() - began) / len(rows)
        # The caller would hold them while the next ones are read.
        task.weights.clear()
        for layer, norm in zip(layers, columns.get("task_norm", []), strict=False):
            self._refuse_norm(number, layer, norm)
        if not all(map(is_finite, after.values())):
            self._refuse_infinite(number, part, after)
        for position, merged_layer in enumerate(part.merged):
            report = {
                "step": self.reader.first_step + number,
                "shape": merged_layer.layer.view.shape,
                "seconds": seconds,
            }
            report |= {key: values[position] for key, values in columns.items()}
            merged_layer.record["reports"].append(report)
        if part is batch:
            batch.state = after
            return
        for key, value in batch.state.items():
            batch.state[key] = replace_rows(value, rows, after[key])

    def _update(
        self,
        number: int,
        batch: _Batch,
        task: _TaskWeights,
        device: torch.device,
        float64: bool,
    ) -> tuple[State, Measures]:
        """Return what the method returns for a task, computed on a device."""
        method = self.reader.method.for_stack([layer.name for layer in batch.layers])
        base = _to(batch.base, device, float64)
        # The method alone holds a stack of weights, and can free it.
        return method.update(
            _to(batch.state, device, float64),
            base,
            TaskVector(
                _to(_stack(task.weights), device, float64),
                base,
                strength=self._strengths[number],
                rounding=task.rounding,
                rounding_before=task.rounding_before,
            ),
            self.reader.first_step + number,
        )

    def _refuse_norm(self, number: int, layer: Layer, norm: float) -> None:
        smallest, largest = NORMS
        if norm != 0 and not smallest <= norm <= largest:
            raise ValueError(
                f"model '{self.reader.task_names[number]}', layer {_label(layer)}: its update has "
                f"the norm {norm:.0e}, and the methods compute with norms from {smallest:.0e} to "
                f"{largest:.0e}: leave the layer out, or scale the model"
            )

    def _refuse_infinite(self, number: int, batch: _Batch, state: State) -> None:
        for row, layer in enumerate(batch.layers):
            if not all(is_finite(value[row]) for value in state.values()):
                raise ValueError(
                    f"model '{self.reader.task_names[number]}', layer '{layer.name}': the result "
                    f"is too large for {batch.base.dtype}, or its squares are"
                )

    def _merged_weight(self, merged: MergedLayer, device: torch.device) -> Tensor:
        """Return the merged weight of a layer as the base stores it."""
        method = self.reader.method
        if method.is_stateless:  # it has been solved
            return self.reader.as_stored(merged, merged.state["weight"])
        method = method.for_stack([merged.layer.name])
        state = {key: value[None] for key, value in merged.state.items()}
        base = merged.theta_0[None]

        def merged_weight(device: torch.device, float64: bool) -> Tensor:
            return method.merged_weight(_to(state, device, float64), _to(base, device, float64))

        with self._turn_on(device):
            weight = self._solved(merged_weight, [merged.layer], device)
        return self.reader.as_stored(merged, weight[0].to(base.dtype))

    def _solved(
        self,
        solve: Callable[[torch.device, bool], _R],
        layers: Sequence[Layer],
        device: torch.device,
    ) -> _R:
        """Return on a device what a function of the method returns there, or, where its solver
        fails for a single layer, on the CPU, in the end in float64.

        ``solve`` takes a device, and whether to compute in float64.
        """
        label = _label(layers[0])
        attempts = [(device, False, ""), (CPU, True, "float64 on the CPU")]
        if device != CPU and self.reader.method.itemsize == 8:
            # What computes in float64 by itself has the same bits there.
            attempts.insert(1, (CPU, False, "the CPU"))
        failure: RuntimeError | None = None
        for solving_device, float64, name in attempts:
            if failure is not None:
                warn_once("%s: %s takes over in such layers, which is slower", str(failure), name)
            try:
                with oom_as_error(label, solving_device):
                    return _to(solve(solving_device, float64), device)
            except RuntimeError as error:
                if len(layers) > 1 or classify_error(error) is None:
                    raise
                failure = error.with_traceback(None)  # which would hold the matrices
        raise ValueError(
            f"layer {label}: no singular vectors, in float64 on the CPU either: {failure}"
        ) from failure

    def _turn_on(self, device: torch.device) -> AbstractContextManager[object]:
        """Wait until no other batch is solved on a GPU; on a CPU, every thread solves."""
        return self._turns.get(device, nullcontext())


def _label(layer: Layer) -> str:
    return f"'{layer.name}' {layer.view.shape}"


class Budget:
    """A memory limit: threads wait until their reservations fit; one above the limit is granted on
    its own.
    """

    def __init__(self, nbytes: int) -> None:
        self._limit = nbytes
        self._used = 0
        self._changed = Condition()

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + nbytes <= self._limit)
            self._used += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                # All, since reservations are of different sizes, and any of them may fit.
                self._changed.notify_all()


@dataclass(frozen=True)
class Work:
    """What one thread does in a merge, and how many elements the tensors have that it makes."""

    numel: int
    do: Callable[[], int]
    """Returns the number of layers that it merged."""


def merge_layers(
    reader: LayerReader,
    layers: Sequence[Layer],
    on_layer: OnLayer,
    other_work: Sequence[Work] = (),
) -> Generator[int, None, None]:
    """Merge layers in this process, and hand over each; yield the number of those that were merged
    meanwhile. The same threads do the other work.

    Until this generator is closed, layers may be handed over.
    """
    work = [*other_work]
    # A run that goes on may have none left, for which no stream of a GPU is made.
    if layers:
        merger = LayerMerger(reader)
        for batch in reader.batches(layers):
            numel = sum(math.prod(layer.view.shape) for layer in batch)
            work.append(Work(numel, partial(merger.merge, batch, on_layer)))
    # The largest first, so that none is left with one thread while the others have none, and what
    # is freed holds what comes next.
    work.sort(key=attrgetter("numel"), reverse=True)
    yield from map_layers(methodcaller("do"), work, reader.devices[0], reader.workers)


def batch_size(
    method: LayerMethod,
    shape: tuple[int, ...],
    itemsize: int,
    device: torch.device,
    batch_bytes: int,
) -> int:
    """Return how many layers of a shape are solved together: one on a CPU, else as many as
    ``batch_bytes`` hold, if that is what the method is for.
    """
    if device.type == "cpu" or not method.solves_together:
        return 1
    return max(1, batch_bytes // method.working_bytes(shape, itemsize))


def _stack(weights: list[Any]) -> Any:
    """Return weights, or factors, of layers of one shape as one, ``(n, ...)``. A single one is not
    copied; others are taken out of the list, so that none is held twice.
    """
    if isinstance(weights[0], LowRank):
        left = stack([weight.left for weight in weights])
        right = stack([weight.right for weight in weights])
        whole: Any = LowRank(left, right)
    else:
        whole = stack(weights)
    if len(weights) > 1:
        weights.clear()
    return whole


def _to(values: Any, device: torch.device, float64: bool = False) -> Any:
    """Return tensors, factors, states, or a tuple of them, on a device, if asked for in float64."""
    if isinstance(values, dict):
        return {key: _to(value, device, float64) for key, value in values.items()}
    if isinstance(values, tuple):
        return tuple(_to(value, device, float64) for value in values)
    if isinstance(values, LowRank):
        return LowRank(_to(values.left, device, float64), _to(values.right, device, float64))
    values = values.to(device)
    return values.double() if float64 and values.is_floating_point() else values
