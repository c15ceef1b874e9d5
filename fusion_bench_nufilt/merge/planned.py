"""The layers of a plan: how they are read from its models, in how much memory, and how they are
written with what the next merge needs (:mod:`.kept_state`).
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from threading import Lock

import torch
from torch import Tensor

from fusion_bench_nufilt.methods.base import State
from fusion_bench_nufilt.models.layers import Layer
from fusion_bench_nufilt.models.source import check_belongs
from fusion_bench_nufilt.nufilt.low_rank import LowRank
from fusion_bench_nufilt.nufilt.noise import rounding_of
from fusion_bench_nufilt.utils.devices import free_memory, process_memory
from fusion_bench_nufilt.utils.tensors import (
    FLOATS,
    TensorInfo,
    compute_dtype,
    is_finite,
)

from .basis import Basis, LayerInBasis, best_factors
from .engine import Budget, Form, LayerReader, MergedLayer
from .kept_state import kept_state
from .output import Record
from .plan import Plan

log = logging.getLogger(__name__)

#: On an accelerator, layers of equal shape are solved together within about this much memory.
BATCH_BYTES = 4 * 2**30


class PlannedLayers(LayerReader):
    """The layers of a plan, whose weights are read as they are merged."""

    def __init__(self, plan: Plan, strengths: Sequence[float] | None = None) -> None:
        """``strengths`` are those of the tasks, measured here by default."""
        self.plan = plan
        self.kept = kept_state(plan)
        self.method = plan.method
        self.devices = plan.settings.devices
        self.workers = plan.settings.workers
        self.batch_bytes = BATCH_BYTES
        self.task_names = [task.source.name for task in plan.tasks]
        self.first_step = plan.first_step
        self._strengths = strengths
        self._measuring = Lock()

    @property
    def memory_limit(self) -> int:
        return self.budget(self.workers)

    @property
    def strengths(self) -> Sequence[float]:
        # The first thread that asks measures them for all.
        with self._measuring:
            if self._strengths is None:
                self._strengths = self._measure_strengths()
            return self._strengths

    def _measure_strengths(self) -> Sequence[float]:
        if not self.method.weighs_tasks:
            return [1.0] * len(self.plan.tasks)
        from .strength import measure_strengths

        if not self.plan.settings.on_cpu:
            return measure_strengths(self.plan, self.devices, len(self.devices))
        # No layer is merged meanwhile, whose memory this may take.
        budget = Budget(self.memory_limit)

        def reserve(layer: Layer) -> AbstractContextManager[None]:
            return budget.reserve(self.memory(layer))

        return measure_strengths(self.plan, self.devices, self.workers, reserve)

    def form(self, layer: Layer) -> Form:
        return self._shape_merged(layer), (self.plan.dtype(layer.keys[0]),)

    def most_together(self, layer: Layer) -> int:
        size = super().most_together(layer)
        settings = self.plan.settings
        # A batch passes through main memory as a whole on its way to an accelerator and back.
        if settings.max_memory is not None:
            free = settings.max_memory - process_memory(settings.workers)
            size = max(1, min(size, free // self.memory(layer)))
        return size

    def memory(self, layer: Layer) -> int:
        # On a GPU, a layer only passes through main memory.
        if self.plan.settings.on_cpu:
            return self.solving_memory(layer)
        return self._stored_memory(layer)

    def solving_memory(self, layer: Layer) -> int:
        itemsize = max(4, self.plan.dtype(layer.keys[0]).itemsize)
        return self._stored_memory(layer) + self.working_memory(self._shape_merged(layer), itemsize)

    @cached_property
    def widens_tasks(self) -> bool:
        # What is quantised is decoded by scales in float32.
        for model in self.plan.models.values():
            if any(info.is_quantised for info in model.source.tensors.values()):
                return True
        return super().widens_tasks

    def _shape_merged(self, layer: Layer) -> tuple[int, int]:
        """Return the shape ``(d_o, d_i)`` in which a layer is merged."""
        return self.kept.shape_in_basis(layer) or layer.view.shape

    def _stored_memory(self, layer: Layer) -> int:
        """Return the bytes of a layer's weights and state as they are read."""
        plan = self.plan
        numel = math.prod(layer.view.shape)
        base_itemsize = plan.dtype(layer.keys[0]).itemsize
        in_basis = self.kept.shape_in_basis(layer)
        state_bytes = sum(tensor.like.nbytes for tensor in self.kept.of_layer(layer).values())
        if in_basis is not None:
            # The factors with their basis; at the end the base, widened, and its sum with the
            # update.
            wide_itemsize = max(4, base_itemsize)
            factors = 4 * wide_itemsize * in_basis[0] * sum(layer.view.shape)
            last_product = (base_itemsize + 2 * wide_itemsize) * numel
            if plan.is_adapter:
                # Decomposed in float64, with all that this takes.
                last_product = 5 * 8 * in_basis[0] * sum(layer.view.shape)
            if not plan.keeps_state:
                return factors + last_product
            if plan.is_adapter:
                return factors + last_product + state_bytes
            # The state with the layer's own sides, and once more as it is written, beside the
            # weight.
            writing = (base_itemsize + wide_itemsize) * numel + 2 * state_bytes
            return factors + max(last_product + state_bytes, writing)
        # One task's weight is held at a time. The factors of a LoRA are too thin to count.
        task_itemsize = 0
        for task in plan.tasks:
            if layer.param in task.keys:
                info = task.source.tensors[task.keys[layer.param]]
                task_itemsize = max(task_itemsize, FLOATS[info.dtype].itemsize)
        return (base_itemsize + task_itemsize) * numel + state_bytes

    def budget(self, workers: int) -> int:
        """Return the bytes that all layers in progress may take together with so many workers."""
        batch_bytes = []
        for batch in self.batches(self.plan.layers):
            batch_bytes.append(sum(map(self.memory, batch)))
        # The worst case, in which the largest batches of all are in progress at a time.
        largest = sum(sorted(batch_bytes)[-workers:])
        bound = self.plan.settings.max_memory
        if bound is None:
            return largest
        return min(largest, bound - process_memory(workers))

    def read(self, layer: Layer, device: torch.device) -> MergedLayer:
        plan = self.plan
        key = layer.keys[0]
        if self.kept.shape_in_basis(layer) is not None:
            return self._read_in_basis(layer, device)
        weight = plan.base.read(key, device)
        theta_0 = layer.view.matrix(weight.to(plan.dtype(key)))
        state = self.kept.read(layer, device)
        if plan.method.is_stateless:
            state = {"weight": self._weight_so_far(layer, theta_0, state)}
        elif not state:
            stack = plan.method.for_stack([layer.name]).init_state(theta_0[None])
            state = {name: value[0] for name, value in stack.items()}
        record: Record = {"param": layer.param, "written": [], "reports": []}
        return MergedLayer(layer, theta_0, state, record)

    def _read_in_basis(self, layer: Layer, device: torch.device) -> LayerInBasis:
        """Read the factors of all tasks, and return the layer in their basis, on a base of
        zeros.
        """
        plan = self.plan
        # Of the base, an adapter's factors need nothing.
        no_values = torch.empty(0, dtype=plan.dtype(layer.keys[0]), device=device)
        factors = {}
        for number, task in enumerate(plan.tasks):
            if layer.param in task.params:
                update = task.weight(layer.param, no_values)
                update = task.scaled(update, no_values)
                assert isinstance(update, LowRank)
                factors[number] = update.to(compute_dtype(no_values))
        updates = list(factors.values())
        earlier, kept = self.kept.read_directions(layer, device)
        if earlier is not None:
            updates.append(earlier.to(compute_dtype(no_values)))
        basis, lefts, rights = Basis.of(
            [update.left for update in updates],
            [update.right for update in updates],
            self.method.sides_in_basis,
        )
        zeros = no_values.new_zeros(self._shape_merged(layer), dtype=compute_dtype(no_values))
        stack = self.method.for_stack([layer.name]).init_state(zeros[None])
        state = {name: value[0] for name, value in stack.items()}
        if earlier is not None:
            state = self.kept.turn(layer, kept, state, LowRank(lefts[-1], rights[-1]))
        in_basis = {}
        for number, left, right in zip(factors, lefts, rights, strict=False):
            in_basis[number] = LowRank(left.contiguous(), right.contiguous())
        record: Record = {"param": layer.param, "written": [], "reports": []}
        return LayerInBasis(layer, zeros, state, record, basis, in_basis)

    def _weight_so_far(self, layer: Layer, theta_0: Tensor, kept: State) -> Tensor:
        """Return the merged weight before the first task, in float32 at least."""
        plan = self.plan
        so_far = theta_0
        if plan.merged is not None:
            like = layer.view.as_stored(theta_0)
            if not kept:
                weight = plan.merged.weight(layer.param, like)
            else:
                weight = kept["weight"]
                info = plan.merged.source.tensors[plan.merged.keys[layer.param]]
                rounded = weight.to(FLOATS[info.dtype])
                stored = plan.merged.weight(layer.param, rounded)
                assert isinstance(stored, Tensor)
                # The model has the same weight rounded, which tells a state of other weights.
                if rounded.dtype.itemsize < weight.dtype.itemsize:
                    assert plan.state is not None
                    check_belongs(weight, stored, layer.name, plan.state.source)
            assert isinstance(weight, Tensor)
            so_far = layer.view.matrix(weight)
        # A task would be rounded with it: the result is rounded once, when it is written.
        return so_far.to(compute_dtype(theta_0))

    def read_task(self, number: int, merged: MergedLayer) -> Tensor | LowRank | None:
        layer = merged.layer
        task = self.plan.tasks[number]
        if isinstance(merged, LayerInBasis):
            return merged.factors.get(number)
        if layer.param not in task.params:
            return None
        theta_0 = layer.view.as_stored(merged.theta_0)
        weight = task.weight(layer.param, theta_0)
        if isinstance(weight, LowRank):
            return weight
        return layer.view.matrix(weight)

    @property
    def coefficients(self) -> Sequence[float]:
        return [task.coefficient for task in self.plan.tasks]

    def rounding_of_base(self, merged: MergedLayer) -> float:
        stored = FLOATS[self.plan.base.tensors[merged.layer.keys[0]].dtype]
        # The base is computed in the dtype of the result.
        if merged.theta_0.dtype.itemsize < stored.itemsize:
            return rounding_of(merged.theta_0)
        return 0.0

    def rounding_before(self, merged: MergedLayer) -> float:
        if self.plan.merged is None:
            return 0.0
        recorded = self.plan.merged_manifest.get("rounding", {}).get(merged.layer.name)
        if isinstance(merged, LayerInBasis):
            return recorded or 0.0  # factors have none of their own
        if recorded is None:
            return super().rounding_before(merged)
        if self.kept.has_state(merged.layer) or "weight" not in merged.state:
            return recorded
        # The model that was left may have been rounded, whatever its tasks are.
        return max(recorded, 2 * rounding_of(merged.state["weight"]))

    @property
    def num_tasks_before(self) -> int:
        # What has no manifest is one model.
        return max(self.first_step - 1, self.plan.merged_manifest.get("step", 1))

    def weighted(
        self, number: int, merged: MergedLayer, weight: Tensor | LowRank
    ) -> Tensor | LowRank:
        if isinstance(merged, LayerInBasis):
            return weight  # all factors were read, and weighted, with their basis
        return super().weighted(number, merged, weight)

    def as_stored(self, merged: MergedLayer, weight: Tensor) -> Tensor:
        layer = merged.layer
        if self.plan.is_adapter:
            return weight
        if isinstance(merged, LayerInBasis):
            weight = self._on_base(merged, weight)
        return layer.view.as_stored(weight)

    def _on_base(self, merged: LayerInBasis, update: Tensor) -> Tensor:
        """Return the weight ``(d_o, d_i)`` that an update in the basis makes of the base's, which
        is read here.
        """
        layer = merged.layer
        stored = self.plan.base.read(layer.keys[0], update.device)
        theta_0 = layer.view.matrix(stored).to(update.dtype)
        factors = merged.basis.product(update)
        return torch.addmm(theta_0, factors.left, factors.right)

    def pieces(
        self,
        state_places: Mapping[str, TensorInfo],
        merged: MergedLayer,
        merged_weight: Callable[[], Tensor],
    ) -> list[tuple[TensorInfo, Tensor]]:
        """Return a layer's state, if it is kept, and its weight, with their places in the result.

        ``state_places`` has the places in the file of the state, by key; none if there is no such
        file.
        """
        plan = self.plan
        layer = merged.layer
        weight = merged_weight()
        state = merged.state
        if state_places and isinstance(merged, LayerInBasis):
            state = self.kept.expand(merged, weight)
        weight = plan.vocabulary.grown_layer(layer.param, weight)
        pieces: list[tuple[TensorInfo, Tensor]] = []
        if state_places:
            for key, value in self.kept.by_key(layer, state).items():
                if key in state_places:
                    pieces.append((state_places[key], value.cpu()))
        if plan.is_adapter:
            assert isinstance(merged, LayerInBasis)
            update = merged.basis.product(weight)
            weights = factors_by_key(plan, layer.param, update, merged.record)
        else:
            weights = dict.fromkeys(layer.keys, weight)
        for key, wide in weights.items():
            place = plan.places[key]
            value = wide.to(FLOATS[place.dtype])
            # What is finite in float32 may be infinite in float16, which the engine can't see.
            if not is_finite(value):
                raise ValueError(
                    f"tensor '{key}': the merged weight is too large for {place.dtype}"
                )
            pieces.append((place, value.cpu()))
        return pieces


def peak_memory(plan: Plan, workers: int | None = None) -> int:
    """Predict the peak resident memory of a process in bytes, by default with this process's
    workers.
    """
    workers = workers or plan.settings.workers
    return process_memory(workers) + PlannedLayers(plan).budget(workers)


def affords_state(plan: Plan, device: torch.device) -> bool:
    """Tell whether a device has room for what a merge of models in its memory would round to their
    dtype after each task, in float32, and say so if it has not.
    """
    settings = dataclasses.replace(plan.settings, state=True)
    keeping = dataclasses.replace(plan, settings=settings)
    state_bytes = sum(tensor.like.nbytes for tensor in kept_state(keeping).needed())
    if not state_bytes:
        return False
    needed = state_bytes
    if device.type == "cpu":
        needed += peak_memory(keeping) - process_memory(workers=0)
    if needed <= free_memory(device):
        return True
    log.warning(
        "the merged model is rounded to the pretrained one's dtype after every task: memory has no "
        "room for it in float32 (%.1f GB). A merge of folders rounds once",
        state_bytes / 1e9,
    )
    return False


def disk_bytes(plan: Plan) -> int:
    """Return the bytes of all weight files while the result is made."""
    total = 0
    for task in plan.tasks:
        for key in task.head.values():
            total += task.source.tensors[key].nbytes
    _, state_file = kept_state(plan).layout()
    for tensors in (*plan.files.values(), state_file):
        for info in tensors.values():
            total += info.nbytes
    return total


def factors_by_key(plan: Plan, param: str, update: LowRank, record: Record) -> dict[str, Tensor]:
    """Return A and B of an update in an adapter, by their keys in it, in the rank that it has
    there; note the energies of what stays and of the whole.
    """
    keys_of_names = plan.adapter_keys[param]
    rank = plan.places[keys_of_names[0].a].shape[0]
    factors, record["energy"] = best_factors(update, rank)
    values = {}
    for keys in keys_of_names:
        values[keys.a], values[keys.b] = factors.right, factors.left
        if keys.of_embedding:
            values[keys.a], values[keys.b] = factors.left.mT, factors.right.mT
    return values
