"""The scheduler of all merges: jobs several at a time, within a memory limit, in this process.

A :class:`Job` says what is read, by which :class:`fusion_bench_nufilt.methods.LayerMethod` that is
merged, and what is written. It is told on which device, and knows of no threads and no failures.
"""

import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from threading import Condition, Lock
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fusion_bench_nufilt.methods.base import (
    LayerMethod,
    Measures,
    State,
    block_bytes,
    check_update,
)
from fusion_bench_nufilt.methods.task_vector import TaskVector
from fusion_bench_nufilt.models.model import scaled_update
from fusion_bench_nufilt.nufilt.low_rank import LowRank
from fusion_bench_nufilt.nufilt.noise import rounding_of, summed_rounding
from fusion_bench_nufilt.utils.devices import (
    BATCHES_PER_GPU,
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
)

log = logging.getLogger(__name__)

CPU = torch.device("cpu")

#: Of a task's update in a layer. Cubes of what is outside leave float32's range, 1e-38 to 3e38.
NORMS = (1e-12, 1e12)

_R = TypeVar("_R")


@dataclass(frozen=True)
class TaskInput:
    """What a job takes of a task."""

    name: str  # of the model
    read: Callable[["LayerInProgress"], Tensor | LowRank | None]
    """Reads its matrix of a layer in the dtype in which it is stored, or the factors of its update,
    to the layer's device; None if it has the layer as it is in the base.
    """
    strength: float = 1.0
    coefficient: float = 1.0
    """What its update is multiplied by in the merge."""


#: What a tensor of the result is written to: a place in a file, or a name in memory.
Pieces = Iterable[tuple[Any, Tensor]]


@dataclass(frozen=True)
class Job:
    """How a matrix of the result, or a block of another tensor, comes about: what is read of each
    model, the rule by which it is merged, and what is written of it.
    """

    name: str  # in the model, which decides random draws
    rule: LayerMethod
    read: Callable[["Job", torch.device], "LayerInProgress"]
    """Reads the base, and the state before the first task, to a device."""
    tasks: Sequence[TaskInput]
    first_step: int  # the number of the first task, from 1: in the stream, or in a tensor's mean
    pieces: Callable[["LayerInProgress", Callable[[], Tensor]], Pieces]
    """Returns what is written, given what was merged, and the function that computes its weight."""
    shape: tuple[int, ...] = ()  # of a layer, which may be merged in the smaller one of a basis
    shape_merged: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()  # of the base, and of what else is stacked
    memory: int = 0  # the bytes of main memory held meanwhile
    solving_memory: int = 0  # those on the device

    def __str__(self) -> str:
        return f"'{self.name}' {self.shape}"

    @property
    def form(self) -> object:
        """What jobs have in common that are done together."""
        return self.shape_merged, self.dtypes


@dataclass(frozen=True)
class Blocks:
    """A tensor of which one block at a time is merged, so that none is held as a whole."""

    record: Any  # a dict with the "param" of the tensor
    numel: int
    jobs: Iterable[Job]  # of its blocks, in their order
    device: torch.device = CPU  # where its blocks are merged


class Machine(NamedTuple):
    """Where jobs are done, and in how much memory."""

    devices: list[torch.device]  # of one kind
    workers: int  # the number of batches of jobs in progress
    max_memory: int | None = None  # the bytes of main memory that these may take together
    batch_bytes: int = 2**30
    """On an accelerator, layers are solved together within about this much memory."""


@dataclass
class LayerInProgress:
    """The matrix of a job, and what the tasks so far made of it."""

    job: Job
    theta_0: Tensor  # (d_o, d_i)
    state: State  # of this matrix alone
    record: Any  # a dict with the "reports" of its steps
    rounding: float = field(default=0.0, kw_only=True)
    """What rounding has added to its update so far, see :mod:`fusion_bench_nufilt.nufilt.noise`."""
    rounding_of_base: float = field(default=0.0, kw_only=True)
    """The rounding of the base's values, where they have been rounded as they were read, else 0: a
    task begins with what is stored."""


@dataclass
class _Batch:
    """Matrices of one shape that are merged together on a device."""

    merged: list[LayerInProgress]
    base: Tensor  # (n, d_o, d_i)
    state: State  # of all layers
    device: torch.device

    @property
    def jobs(self) -> list[Job]:
        return [merged_layer.job for merged_layer in self.merged]

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


Add = Callable[[Any, Pieces], object]
"""Takes the record of what was merged, and its pieces."""


def working_memory(
    rule: LayerMethod,
    shape: tuple[int, int],
    itemsize: int,
    device: torch.device,
    *,
    widens_tasks: bool,
) -> int:
    """Return the bytes that a layer takes while it is merged, beside its weights and state.

    ``widens_tasks`` says that some task's weights are wide as a whole, with the base's and what
    becomes of them.
    """
    working = rule.working_bytes(shape, itemsize)
    wide = itemsize * math.prod(shape)
    if device.type != "cpu":
        # A GPU subtracts all rows at once.
        return working + 3 * wide
    if widens_tasks:
        # The base's weights, the task's and what becomes of them, and then the last of these.
        return max(working, 2 * wide + block_bytes(shape, itemsize)) + wide
    return working


def rounding_before(theta_0: Tensor, so_far: Tensor, num_tasks: int) -> float:
    """Return what rounding has added to a layer in earlier merges of so many tasks, where nobody
    recorded it: as much as if each task had the digits of the model so far, or the base's.
    """
    rounding = max(rounding_of(so_far), rounding_of(theta_0))
    # Of the tasks, and of the base in all of them alike.
    return num_tasks * (num_tasks + 1) * rounding


def batches(jobs: Sequence[Job], machine: Machine) -> list[list[Job]]:
    """Return the jobs that are done together: one on a CPU, else several of one form."""
    groups = defaultdict(list)
    for job in jobs:
        groups[job.form].append(job)
    all_batches = []
    for group in groups.values():
        size = batch_size(group[0], machine)
        all_batches += [group[first : first + size] for first in range(0, len(group), size)]
    return all_batches


def batch_size(job: Job, machine: Machine) -> int:
    """Return the most jobs like this one in a batch: one on a CPU, else as many as ``batch_bytes``
    hold, if that is what the rule is for.
    """
    if machine.devices[0].type == "cpu" or not job.rule.solves_together:
        return 1
    itemsize = max(4, job.dtypes[0].itemsize)
    size = machine.batch_bytes // job.rule.working_bytes(job.shape_merged, itemsize)
    # A batch passes through main memory as a whole on its way to an accelerator and back.
    if machine.max_memory is not None:
        size = min(size, machine.max_memory // job.memory)
    return max(1, size)


def memory_limit(jobs: Sequence[Job], machine: Machine) -> int:
    """Return the bytes of main memory that jobs may take together."""
    batch_bytes = [sum(job.memory for job in batch) for batch in batches(jobs, machine)]
    # The worst case, in which the largest batches of all are in progress at a time.
    largest = sum(sorted(batch_bytes)[-machine.workers :])
    if machine.max_memory is None:
        return largest
    return min(largest, machine.max_memory)


class Worker:
    """Does jobs in this process: one per thread on a CPU, batches of them on GPUs.

    Several batches are on a GPU at a time. One of them is solved while the others are read and
    written, so that the slowest of the three alone counts. A batch stays in one thread and on one
    CUDA stream, where its operations wait for no other batch's.
    """

    def __init__(self, machine: Machine, memory_limit: int) -> None:
        """``memory_limit`` has the bytes of main memory that jobs may take together."""
        self.machine = machine
        self._budget = Budget(memory_limit)
        devices = [device for device in machine.devices if device.type == "cuda"]
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
    def do(self, jobs: list[Job], add: Add) -> int:
        """Do some jobs of one form, hand over what each made, and return their number.

        They are done together, or half of them at a time where that fails.
        """
        with ExitStack() as held:
            # Memory, stream, room: in one order in all threads, so that no two wait for each other.
            held.enter_context(self._budget.reserve(sum(job.memory for job in jobs)))
            device = self.machine.devices[0]
            if self._gpus:
                stream = held.enter_context(self._streams.free())
                device = stream.device
                on_gpu = sum(job.solving_memory for job in jobs)
                held.enter_context(self._room[device].reserve(on_gpu))
                held.enter_context(torch.cuda.stream(stream))
            waiting = deque([jobs])
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
                    merged_weight = partial(self._merged_weight, merged_layer, device)
                    add(merged_layer.record, merged_layer.job.pieces(merged_layer, merged_weight))
                # Else one half would be held in memory while the other is solved.
                del merged
            if self._gpus:
                stream.synchronize()  # the caller reads the results on another stream
        return len(jobs)

    @torch.no_grad()
    def do_blocks(self, tensor: Blocks, add: Add) -> int:
        """Do the jobs of a tensor's blocks, one after the other, and hand over their pieces; return
        the number of layers done, which is none.
        """

        def pieces() -> Pieces:
            for job in tensor.jobs:
                (merged,) = self._solve([job], tensor.device)
                yield from job.pieces(merged, partial(self._merged_weight, merged, tensor.device))

        add(tensor.record, pieces())
        return 0

    def _log_halving(self, jobs: Sequence[Job], device: torch.device, error: Exception) -> None:
        warn_once(
            "device '%s', %d layers of shape %s together: %s; halves take over, which changes "
            "them by rounding",
            device,
            len(jobs),
            jobs[0].shape,
            classify_error(error),
        )

    def _solve(self, jobs: Sequence[Job], device: torch.device) -> list[LayerInProgress]:
        """Read matrices of one shape to a device, and add all tasks to their states."""
        batch = self._read(jobs, device)
        for number in range(len(jobs[0].tasks)):
            for task in self._read_task(number, batch):
                self._add_task(number, batch, task)
        for key, value in batch.state.items():
            for layer, layer_value in zip(batch.merged, value, strict=True):
                layer.state[key] = layer_value
        for layer in batch.merged:
            layer.record["rounding"] = layer.rounding
        return batch.merged

    def _read(self, jobs: Sequence[Job], device: torch.device) -> _Batch:
        """Read matrices of the base, and their states before the first task, as one batch."""
        merged: list[LayerInProgress] = []
        for job in jobs:
            with oom_as_error(str(job), device):
                merged.append(job.read(job, device))
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
            job = layer.job
            task = job.tasks[number]
            with oom_as_error(str(job), batch.device):
                weight = task.read(layer)
            if weight is None:
                continue
            # Factors have not been rounded to the digits of a weight.
            rounding = 0.0
            if isinstance(weight, Tensor):
                of_values = max(rounding_of(weight), layer.rounding_of_base)
                # The task's own and the base's, at the task's coefficient.
                rounding = 2 * task.coefficient**2 * of_values
            weight = scaled_update(weight, layer.theta_0, task.coefficient)
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
        jobs = part.jobs
        began = time.perf_counter()
        update = partial(self._update, number, part, task)
        with self._turn_on(batch.device):
            after, measures = self._solved(update, jobs, batch.device)
            # A solver may have needed float64.
            after = {key: value.to(part.state[key].dtype) for key, value in after.items()}
            # Reading them waits for an accelerator.
            columns = {key: values.tolist() for key, values in measures.items()}
        seconds = (time.perf_counter() - began) / len(rows)
        # The caller would hold them while the next ones are read.
        task.weights.clear()
        for job, norm in zip(jobs, columns.get("task_norm", []), strict=False):
            _refuse_norm(number, job, norm)
        if not all(map(is_finite, after.values())):
            _refuse_infinite(number, part, after)
        for position, merged_layer in enumerate(part.merged):
            report = {
                "step": merged_layer.job.first_step + number,
                "shape": merged_layer.job.shape,
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
        first = batch.jobs[0]
        rule = first.rule.for_stack([job.name for job in batch.jobs])
        base = _to(batch.base, device, float64)
        # The rule alone holds a stack of weights, and can free it.
        result = rule.update(
            _to(batch.state, device, float64),
            base,
            TaskVector(
                _to(_stack(task.weights), device, float64),
                base,
                strength=first.tasks[number].strength,
                rounding=task.rounding,
                rounding_before=task.rounding_before,
            ),
            first.first_step + number,
        )
        return check_update(rule, batch.state, result)

    def _merged_weight(self, merged: LayerInProgress, device: torch.device) -> Tensor:
        """Return the merged weight of a layer ``(d_o, d_i)``."""
        rule = merged.job.rule
        if not rule.keeps_sums:  # it has been solved
            return merged.state["weight"]
        rule = rule.for_stack([merged.job.name])
        state = {key: value[None] for key, value in merged.state.items()}
        base = merged.theta_0[None]

        def merged_weight(device: torch.device, float64: bool) -> Tensor:
            return rule.merged_weight(_to(state, device, float64), _to(base, device, float64))

        with self._turn_on(device):
            weight = self._solved(merged_weight, [merged.job], device)
        if weight.shape != base.shape:
            raise ValueError(
                f"method '{rule.name}': merged_weight() was given weights {tuple(base.shape)}, "
                f"returned {tuple(weight.shape)}"
            )
        return weight[0].to(base.dtype)

    def _solved(
        self,
        solve: Callable[[torch.device, bool], _R],
        jobs: Sequence[Job],
        device: torch.device,
    ) -> _R:
        """Return on a device what a function of the method returns there, or, where its solver
        fails for a single layer, on the CPU, in the end in float64.

        ``solve`` takes a device, and whether to compute in float64.
        """
        label = str(jobs[0])
        attempts = [(device, False, ""), (CPU, True, "float64 on the CPU")]
        if device != CPU and jobs[0].rule.itemsize == 8:
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
                if len(jobs) > 1 or classify_error(error) is None:
                    raise
                failure = error.with_traceback(None)  # which would hold the matrices
        raise ValueError(
            f"layer {label}: no singular vectors, in float64 on the CPU either: {failure}"
        ) from failure

    def _turn_on(self, device: torch.device) -> AbstractContextManager[object]:
        """Wait until no other batch is solved on a GPU; on a CPU, every thread solves."""
        return self._turns.get(device, nullcontext())


def _refuse_norm(number: int, job: Job, norm: float) -> None:
    smallest, largest = NORMS
    if norm != 0 and not smallest <= norm <= largest:
        raise ValueError(
            f"model '{job.tasks[number].name}', layer {job}: its update has the norm {norm:.0e}, "
            f"and the methods compute with norms from {smallest:.0e} to {largest:.0e}: leave the "
            "layer out, or scale the model"
        )


def _refuse_infinite(number: int, batch: _Batch, state: State) -> None:
    for row, job in enumerate(batch.jobs):
        for value in state.values():
            if not is_finite(value[row]):
                raise ValueError(
                    f"model '{job.tasks[number].name}', layer '{job.name}': the result is too "
                    f"large for {value.dtype}, or its squares are"
                )


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


def do_jobs(
    jobs: Sequence[Job], machine: Machine, add: Add, tensors: Sequence[Blocks] = ()
) -> Generator[int, None, None]:
    """Do jobs, and those of tensors in blocks, in this process, and hand over what each made; yield
    the numbers of layers that were merged meanwhile.

    Until this generator is closed, pieces may be handed over.
    """
    work: list[tuple[int, Callable[[], int]]] = []  # with the number of elements that it makes
    # A run that goes on may have none left, for which no stream of a GPU is made.
    if jobs:
        worker = Worker(machine, memory_limit(jobs, machine))
        for batch in batches(jobs, machine):
            numel = sum(math.prod(job.shape) for job in batch)
            work.append((numel, partial(worker.do, batch, add)))
    on_cpu = Worker(machine._replace(devices=[CPU]), 0)
    for tensor in tensors:
        work.append((tensor.numel, partial(on_cpu.do_blocks, tensor, add)))
    # The largest first, so that none is left with one thread while the others have none, and what
    # is freed holds what comes next.
    work.sort(key=itemgetter(0), reverse=True)
    yield from map_layers(lambda item: item[1](), work, machine.devices[0], machine.workers)


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
