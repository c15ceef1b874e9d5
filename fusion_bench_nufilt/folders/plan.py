"""What a merge will do and what it will take."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import torch

from fusion_bench_nufilt.core import options
from fusion_bench_nufilt.core.devices import check_devices
from fusion_bench_nufilt.core.options import check_choices, check_whole
from fusion_bench_nufilt.core.workers import stack_size
from fusion_bench_nufilt.layers import Coverage, TargetConfig
from fusion_bench_nufilt.storage.tensors import FLOATS

from .architecture import Layer
from .checkpoint import Checkpoint
from .forecast import predict_seconds
from .memory import WORKER_BYTES, layer_memory, process_memory
from .methods import BATCH_BYTES, Method
from .models import FullModel, Task

option = partial(options.option, panel="Machine")


@dataclass(frozen=True)
class Settings:
    """How folders are merged; the method has settings of its own.

    Raises:
        ValueError: a value out of its range; names it.
    """

    seed: int = option(42, "Seed of the adapters' initialisation.", panel="Method")
    step: int | None = option(
        None,
        "Number of the first task in the stream, from 1. If it is not given, it is one more than the manifest of the "
        "merged folder says, and 1 without a merged folder.",
    )
    accumulate: Literal["stored", "float32"] = option(
        "stored",
        "What the merged layers are kept in between steps: stored means the base's dtype; float32 also writes them "
        "beside the model for the next merge, so that rounding does not add up.",
    )
    device: str = option(
        "cpu",
        "Where to compute: cpu works on a layer per thread; cuda, or several such as cuda:0,cuda:1, on stacks of "
        "layers.",
    )
    max_memory: int | None = option(
        None, "The most memory to hold, such as 4GB; fewer layers are then worked on at a time."
    )

    engine: Literal["local", "ray"] = option(
        "local",
        "What computes the layers: local is this process; ray is a worker on every node of a Ray cluster, or on every "
        "GPU of it if device is cuda. This process alone writes, and the result is the same.",
    )
    address: str | None = option(
        None,
        "Address of the Ray cluster, such as auto or 10.0.0.1:6379. If it is not given, it is the cluster that this "
        "machine belongs to, or else a new one on this machine alone.",
    )

    def __post_init__(self) -> None:
        if self.step is not None:
            check_whole(self, "step", least=1, most=10**6)
        if self.max_memory is not None:
            check_whole(self, "max_memory", least=1, most=2**62)
        check_choices(self)
        if self.engine == "local":  # a cluster's workers have devices of their own
            check_devices(self.device)
            if self.address is not None:
                raise ValueError(f"address '{self.address}' is for engine=ray")
        elif self.device not in ("cpu", "cuda"):
            raise ValueError(f"device '{self.device}': engine=ray gives every worker a GPU by itself; say cuda, or cpu")


@dataclass
class Plan:
    """A merge whose models passed the checks on their headers."""

    base: Checkpoint
    merged: FullModel | None  # what is merged so far; None: the base
    state: FullModel | None  # its layers in float32, where an earlier merge kept them
    tasks: list[Task]
    method: Method
    targets: TargetConfig
    settings: Settings
    origin: str  # where the layers are known from
    layers: list[Layer]
    coverage: Coverage  # how much of the model they are
    others: dict[str, tuple[str, ...]]  # the base's other keys, by slot
    averaged: set[str]  # slots of `others` that other_params changes
    first_step: int
    history: list[str]  # names of the tasks merged before
    warnings: list[str]

    @property
    def models(self) -> list[FullModel | Task]:
        """All models beside the base."""
        return [*([self.merged] if self.merged else []), *([self.state] if self.state else []), *self.tasks]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """All that is read."""
        return [self.base, *(model.checkpoint for model in self.models)]

    @property
    def last_step(self) -> int:
        """How many tasks the result holds."""
        return self.first_step + len(self.tasks) - 1

    @property
    def copied(self) -> int:
        """How many tensors stay as they are."""
        return len(self.others) - len(self.averaged)

    @property
    def devices(self) -> list[torch.device]:
        return [torch.device(name) for name in self.settings.device.split(",")]

    @property
    def on_cpu(self) -> bool:
        return self.devices[0].type == "cpu"

    @property
    def workers(self) -> int:
        return torch.get_num_threads() if self.on_cpu else len(self.devices)

    def dtype(self, slot_key: str) -> torch.dtype:
        """The base's dtype of a floating-point tensor."""
        return FLOATS[self.base.tensors[slot_key].dtype]

    def layer_memory(self, layer: Layer) -> int:
        """Bytes held while a layer is merged."""
        dtype = self.dtype(layer.keys[0])
        wide = 8 if dtype == torch.float64 or self.method.exact else 4
        running = wide if self.settings.accumulate == "float32" or self.state else dtype.itemsize
        task = max(self._itemsize(task, layer.slot) for task in self.tasks)
        return layer_memory(layer.view.shape, dtype.itemsize + running + task, wide=wide, on_cpu=self.on_cpu)

    def _itemsize(self, task: Task, slot: str) -> int:
        """Bytes per element of a task's weight as stored; the factors of a LoRA are too thin to count."""
        key = task.keys.get(slot)
        return 0 if key is None else FLOATS[task.checkpoint.tensors[key].dtype].itemsize

    def batches(self, layers: Sequence[Layer]) -> Iterator[list[Layer]]:
        """What is worked on at a time: one layer on a CPU, else as many of a kind as are solved together."""
        groups: dict[tuple[tuple[int, ...], torch.dtype], list[Layer]] = defaultdict(list)
        for layer in layers:
            groups[layer.view.shape, self.dtype(layer.keys[0])].append(layer)
        for (shape, dtype), group in groups.items():
            wide = torch.promote_types(dtype, torch.float32)
            size = stack_size(shape, wide.itemsize, self.devices[0], BATCH_BYTES)
            if self.settings.max_memory is not None:
                size = max(1, min(size, self.budget // self.layer_memory(group[0])))
            yield from (group[i : i + size] for i in range(0, len(group), size))

    def _largest(self, workers: int) -> int:
        """Bytes that layers take together if nothing bounds them."""
        held = sorted(sum(map(self.layer_memory, batch)) for batch in self.batches(self.layers))
        return sum(held[-workers:])

    @cached_property
    def process_memory(self) -> int:
        """Bytes that the process takes apart from the layers."""
        return process_memory(self.workers)

    @property
    def budget(self) -> int:
        """Bytes that layers may take together."""
        if self.settings.max_memory is not None:
            return self.settings.max_memory - self.process_memory
        return self._largest(self.workers)

    @property
    def memory(self) -> int:
        """Predicted peak of the process's resident memory, bytes."""
        return self.memory_of(self.workers)

    def memory_of(self, workers: int) -> int:
        """The same of a process that works on so many batches of layers at a time."""
        alone = self.process_memory + (workers - self.workers) * WORKER_BYTES
        layers = self._largest(workers)
        if self.settings.max_memory is not None:
            layers = min(layers, self.settings.max_memory - alone)
        return alone + layers

    @property
    def keeps_state(self) -> bool:
        """Whether the merged layers are also written in float32: where they are not stored so anyway."""
        narrow = any(self.dtype(layer.keys[0]).itemsize < 4 for layer in self.layers)
        return self.settings.accumulate == "float32" and narrow

    @property
    def disk(self) -> int:
        """Bytes that the result takes."""
        state = sum(4 * self.base.tensors[layer.keys[0]].numel for layer in self.layers)
        return self.base.nbytes + (state if self.keeps_state else 0)

    def predict_seconds(self) -> float:
        """Rough time on this machine's CPU."""
        first_whole = self.merged is None and self.method.takes_first_whole
        steps = [
            (layer.view.shape, task.rank(layer.slot))
            for layer in self.layers
            for task in self.tasks[int(first_whole) :]
            if layer.slot in task.slots
        ]
        nbytes = sum(info.nbytes for model in self.checkpoints for info in model.tensors.values())
        return predict_seconds(steps, nbytes + self.disk, self.method, self.workers)
