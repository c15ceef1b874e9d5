"""Who computes the layers of a merge: this process, or the workers of a cluster."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fusion_bench_nufilt.core.checks import is_finite
from fusion_bench_nufilt.core.devices import DevicePool
from fusion_bench_nufilt.core.workers import map_layers
from fusion_bench_nufilt.storage.tensors import FLOATS, digest, float32_header, raw

from .architecture import Layer
from .memory import Budget, return_freed_memory
from .output import Record
from .plan import Plan
from .preflight import STATE

STATE_FILE = f"{STATE}/model.safetensors"
#: A merged layer: what the journal says of it, and the bytes for each range in ``written`` of that.
Fused = tuple[Record, Sequence[memoryview]]
_Job = TypeVar("_Job")


class Engine(Protocol):
    """Computes layers; whoever calls it writes them."""

    def fuse(self, layers: list[Layer]) -> Iterator[Fused]:
        """Read what the models hold of some layers of a shape, and merge all tasks into them."""

    def side_by_side(self, do: Callable[[_Job], None], jobs: Sequence[_Job]) -> Iterator[None]:
        """Do as many jobs at a time as this engine computes."""

    def close(self) -> None:
        """Release what computes."""


class LocalEngine:
    """This process: a layer per thread on a CPU, stacked on accelerators."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self._budget, self._devices = plan, Budget(plan.budget), DevicePool(plan.devices)
        _, self._state_starts, _ = state_layout(plan)
        return_freed_memory()

    def side_by_side(self, do: Callable[[_Job], None], jobs: Sequence[_Job]) -> Iterator[None]:
        return map_layers(do, jobs, self.plan.devices[0], self.plan.workers)

    def close(self) -> None:
        pass

    def fuse(self, layers: list[Layer]) -> Iterator[Fused]:
        needed = sum(map(self.plan.layer_memory, layers))
        with self._budget.reserve(needed), self._devices.free() as device:
            yield from self._fuse(layers, device)

    def _fuse(self, layers: list[Layer], device: torch.device) -> Iterator[Fused]:
        plan = self.plan
        read: dict[str, dict[str, str]] = {layer.slot: {} for layer in layers}
        reports: dict[str, list[Record]] = {layer.slot: [] for layer in layers}
        theta_0, running = {}, {}
        for layer in layers:
            weight, read[layer.slot]["base"] = plan.base.read(layer.keys[0])
            theta_0[layer.name] = layer.view.matrix(weight)
            so_far = theta_0[layer.name]
            if plan.merged is not None:
                weight, read[layer.slot]["merged"] = plan.merged.weight(layer.slot)
                so_far = layer.view.matrix(weight)
            if plan.state is not None and layer.slot in plan.state.keys:
                weight, read[layer.slot]["state"] = plan.state.weight(layer.slot)
                state = layer.view.matrix(weight)
                if not torch.equal(state.to(so_far.dtype), so_far):
                    raise ValueError(
                        f"'{plan.state.checkpoint.name}' does not belong to the weights beside it: '{layer.name}' "
                        "differs; remove it if the weights are right"
                    )
                so_far = state
            kept = plan.dtype(layer.keys[0])
            if plan.settings.accumulate == "float32":
                kept = torch.promote_types(kept, torch.float32)
            running[layer.name] = so_far.to(kept)
        for number, task in enumerate(plan.tasks):
            changed = [layer for layer in layers if layer.slot in task.slots]  # an adapter may leave some alone
            if not changed:
                continue
            theta_t = {}
            for layer in changed:
                new, read[layer.slot][f"task {number}"] = task.weight(layer.slot)
                theta_t[layer.name] = layer.view.matrix(new) if isinstance(new, Tensor) else new
            step = plan.first_step + number
            fused, report = plan.method.fuse(
                {layer.name: theta_0[layer.name] for layer in changed},
                {layer.name: running[layer.name] for layer in changed},
                theta_t,
                {layer.name: reports[layer.slot] for layer in changed},
                step=step,
                device=str(device),
            )
            if large := [name for name, weight in fused.items() if not is_finite(weight)]:
                raise ValueError(
                    f"model '{task.checkpoint.name}', layer '{large[0]}': the result is too large for "
                    f"{theta_0[large[0]].dtype}, or its squares are"
                )
            running |= fused
            for layer in changed:
                reports[layer.slot].append({"step": step, **dataclasses.asdict(report[layer.name])})
        for layer in layers:
            written, pieces = self._as_stored(layer, running.pop(layer.name))
            record = {"slot": layer.slot, "written": written, "read": read[layer.slot], "reports": reports[layer.slot]}
            yield record, pieces

    def _as_stored(self, layer: Layer, matrix: Tensor) -> tuple[list[tuple[str, int, int, str]], list[memoryview]]:
        """File, first and last byte, digest and bytes wherever the base has a layer, and in float32 if that is kept."""
        plan, weight = self.plan, layer.view.part(matrix)
        written, pieces = [], []
        if plan.keeps_state:
            start, wide = self._state_starts[layer.slot], weight.to(torch.float32)
            written.append((STATE_FILE, start, start + 4 * wide.numel(), digest(wide)))
            pieces.append(raw(wide))
        for key in layer.keys:
            info = plan.base.tensors[key]
            stored = weight.to(FLOATS[info.dtype])
            if not is_finite(stored):
                raise ValueError(f"tensor '{key}': the merged weight is too large for {info.dtype}")
            written.append((info.file, info.start, info.stop, digest(stored)))
            pieces.append(raw(stored))
        return written, pieces


def state_layout(plan: Plan) -> tuple[bytes, dict[str, int], int]:
    """Of the file that keeps the merged layers in float32: header, first byte of each slot, size."""
    header = float32_header({layer.keys[0]: plan.base.tensors[layer.keys[0]].shape for layer in plan.layers})
    starts, offset = {}, len(header)
    for layer in plan.layers:
        starts[layer.slot] = offset
        offset += 4 * plan.base.tensors[layer.keys[0]].numel
    return header, starts, offset
