"""The layers of a plan: how they are read from its models, in how much memory, at which strength of
their tasks, and how they are written with what the next merge needs.

That is the state, in float32 at least: what the method keeps of each layer (for NUFILT, the layer
itself), and the running means of tensors outside the layers, where the model rounds them.

The strength of a task is found from its whole model before any layer is merged. It follows from the
base and the task alone, so that it is the same in memory, from folders, in mergekit, on a cluster,
in a run that goes on, and for tasks that are merged one at a time.
"""

import dataclasses
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusion_bench_nufilt.merge.basis import (
    Basis,
    LayerInBasis,
    along_axes,
    best_factors,
    resize_lists,
)
from fusion_bench_nufilt.merge.engine import LayerSource, MergedLayer, batch_size
from fusion_bench_nufilt.merge.output import Record
from fusion_bench_nufilt.merge.plan import Plan
from fusion_bench_nufilt.methods.base import State
from fusion_bench_nufilt.methods.task_vector import (
    Spectrum,
    rounding_energy,
    spectrum,
    task_strength,
)
from fusion_bench_nufilt.models.adapters import EMBEDDING_A
from fusion_bench_nufilt.models.architecture import Layer
from fusion_bench_nufilt.models.model import ModelWeights
from fusion_bench_nufilt.models.quantised import relative_spacing
from fusion_bench_nufilt.models.source import Source, check_belongs
from fusion_bench_nufilt.models.vocabulary import new_rows_key
from fusion_bench_nufilt.nufilt.low_rank import LowRank
from fusion_bench_nufilt.utils.devices import free_memory, map_layers, process_memory
from fusion_bench_nufilt.utils.manifest import STATE_FILE
from fusion_bench_nufilt.utils.tensors import (
    FLOATS,
    TensorInfo,
    coarser_dtype,
    compute_dtype,
    describe,
    digest,
    is_finite,
    make_header,
    raw_bytes,
    read_header,
    to_compute_dtype,
)

log = logging.getLogger(__name__)

#: On an accelerator, layers of equal shape are solved together within about this much memory.
BATCH_BYTES = 4 * 2**30


class PlannedLayers(LayerSource[Layer]):
    """The layers of a plan, whose weights are read as they are merged."""

    def __init__(self, plan: Plan, strengths: Sequence[float] | None = None) -> None:
        """``strengths`` are those of the tasks, measured here by default."""
        self.plan = plan
        self.method = plan.method
        self.devices = plan.settings.devices
        self.workers = plan.settings.workers
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
                if self.method.weighs_tasks:
                    self._strengths = measure_strengths(self.plan)
                else:
                    self._strengths = [1.0] * len(self.plan.tasks)
            return self._strengths

    def name(self, layer: Layer) -> str:
        return layer.name

    def shape(self, layer: Layer) -> tuple[int, ...]:
        return layer.view.shape

    def batches(self, layers: Sequence[Layer]) -> list[list[Layer]]:
        settings = self.plan.settings
        groups: dict[tuple[tuple[int, ...], torch.dtype], list[Layer]] = defaultdict(list)
        for layer in layers:
            groups[self._shape_merged(layer), self.plan.dtype(layer.keys[0])].append(layer)
        batches = []
        for (shape, dtype), group in groups.items():
            itemsize = max(4, dtype.itemsize)
            size = batch_size(self.method, shape, itemsize, self.devices[0], BATCH_BYTES)
            # A batch passes through main memory as a whole on its way to an accelerator and back.
            if settings.max_memory is not None:
                free = settings.max_memory - process_memory(settings.workers)
                size = max(1, min(size, free // self.memory(group[0])))
            batches += [group[first : first + size] for first in range(0, len(group), size)]
        return batches

    def memory(self, layer: Layer) -> int:
        # On a GPU, a layer only passes through main memory.
        if self.plan.settings.on_cpu:
            return self.solving_memory(layer)
        return self._stored_memory(layer)

    def solving_memory(self, layer: Layer) -> int:
        itemsize = max(self.method.itemsize, self.plan.dtype(layer.keys[0]).itemsize)
        working = self.method.working_bytes(self._shape_merged(layer), itemsize)
        return self._stored_memory(layer) + working

    def _shape_merged(self, layer: Layer) -> tuple[int, int]:
        """Return the shape ``(d_o, d_i)`` in which a layer is merged."""
        return shape_in_basis(self.plan, layer) or layer.view.shape

    def _stored_memory(self, layer: Layer) -> int:
        """Return the bytes of a layer's weights and state as they are read."""
        plan = self.plan
        numel = math.prod(layer.view.shape)
        base_itemsize = plan.dtype(layer.keys[0]).itemsize
        in_basis = shape_in_basis(plan, layer)
        if in_basis is not None:
            # The factors with their basis; at the end the base, widened, and its sum with the
            # update.
            wide_itemsize = max(4, base_itemsize)
            factors = 4 * wide_itemsize * in_basis[0] * sum(layer.view.shape)
            last_product = (base_itemsize + 2 * wide_itemsize) * numel
            if plan.is_adapter:
                # Decomposed in float64, with all that this takes.
                last_product = 5 * 8 * in_basis[0] * sum(layer.view.shape)
            kept = 0
            if plan.keeps_state:
                kept = sum(like.nbytes for _, _, like in state_tensors(plan, layer).values())
            return factors + last_product + kept
        # One task's weight is held at a time. The factors of a LoRA are too thin to count.
        task_itemsize = 0
        for task in plan.tasks:
            if layer.param in task.keys:
                info = task.source.tensors[task.keys[layer.param]]
                task_itemsize = max(task_itemsize, FLOATS[info.dtype].itemsize)
        weights = (base_itemsize + task_itemsize) * numel
        return weights + sum(value.nbytes for _, _, value in state_tensors(plan, layer).values())

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

    def read(self, layer: Layer, device: torch.device) -> MergedLayer[Layer]:
        plan = self.plan
        key = layer.keys[0]
        digests: dict[str, str] = {}
        if self.method.weighs_tasks:
            # They follow from all layers of the tasks, which this layer's digests do not tell.
            digests["strengths"] = str(list(self.strengths))
        if shape_in_basis(plan, layer) is not None:
            return self._read_in_basis(layer, device, digests)
        weight, digests["base"] = plan.base.read(key, device)
        theta_0 = layer.view.matrix(weight.to(plan.dtype(key)))
        state = self._read_state(layer, device, digests)
        if plan.method.is_stateless:
            state = {"weight": self._weight_so_far(layer, theta_0, state, digests)}
        elif not state:
            stack = plan.method.init_state([layer.name], theta_0[None])
            state = {name: value[0] for name, value in stack.items()}
        record: Record = {"param": layer.param, "written": [], "read": digests, "reports": []}
        return MergedLayer(layer, theta_0, state, record)

    def _read_in_basis(
        self, layer: Layer, device: torch.device, digests: dict[str, str]
    ) -> LayerInBasis[Layer]:
        """Read the factors of all tasks, and return the layer in their basis, on a base of
        zeros.
        """
        plan = self.plan
        # Of the base, an adapter's factors need nothing.
        no_values = torch.empty(0, dtype=plan.dtype(layer.keys[0]), device=device)
        factors = {}
        for number, task in enumerate(plan.tasks):
            if layer.param in task.params:
                update, digests[f"task {number}"] = task.weight(layer.param, no_values)
                update = task.at_strength(update, no_values)
                assert isinstance(update, LowRank)
                factors[number] = update.to(compute_dtype(no_values))
        updates = list(factors.values())
        earlier, kept = self._read_earlier(layer, device, digests)
        if earlier is not None:
            updates.append(earlier.to(compute_dtype(no_values)))
        basis, lefts, rights = Basis.of(
            [update.left for update in updates],
            [update.right for update in updates],
            self.method.sides_in_basis,
        )
        zeros = no_values.new_zeros(self._shape_merged(layer), dtype=compute_dtype(no_values))
        stack = self.method.init_state([layer.name], zeros[None])
        state = {name: value[0] for name, value in stack.items()}
        if earlier is not None and self.method.is_stateless:
            state = {"weight": lefts[-1] @ rights[-1]}
        elif earlier is not None:
            state = self._turned_state(layer, kept, state, lefts[-1], rights[-1])
        in_basis = {}
        for number, left, right in zip(factors, lefts, rights, strict=False):
            in_basis[number] = LowRank(left.contiguous(), right.contiguous())
        record: Record = {"param": layer.param, "written": [], "read": digests, "reports": []}
        return LayerInBasis(layer, zeros, state, record, basis, in_basis)

    def _read_earlier(
        self, layer: Layer, device: torch.device, digests: dict[str, str]
    ) -> tuple[LowRank | None, State]:
        """Read the directions of the tasks that a merged adapter holds, as two factors, and the
        state in them; note their digests.

        For NUFILT, they are the factors of the cumulative update. For methods with a state, they
        are the bases in which it was kept, filled with zeros to one number of directions.
        """
        plan = self.plan
        if not any(earlier_directions(plan, layer)):
            return None, {}
        no_values = torch.empty(0, dtype=torch.float32, device=device)
        if plan.state is None or OUTPUTS % layer.name not in plan.state.keys:
            assert plan.merged is not None
            update, digests["merged"] = plan.merged.weight(layer.param, no_values)
            assert isinstance(update, LowRank)
            return update, {}
        kept: State = {}
        digest_of_state = ""
        for name, (key, _, _) in state_tensors(plan, layer).items():
            kept[name], digest_of_value = plan.state.source.read(plan.state.keys[key], device)
            digest_of_state += digest_of_value
        digests["state"] = digest_of_state
        right = kept["weight"] if self.method.is_stateless else kept["inputs"].mT
        return _of_one_rank(kept["outputs"], right), kept

    def _turned_state(
        self, layer: Layer, kept: State, likes: State, outputs: Tensor, inputs: Tensor
    ) -> State:
        """Return the state that was kept, in bases that have its own ``outputs`` ``(m, r)`` and
        ``inputs`` ``(r, n)``.
        """
        turns = {
            "o": outputs[:, : kept["outputs"].shape[1]],
            "i": inputs[: kept["inputs"].shape[1]].mT,
        }
        state = {}
        for name, like in likes.items():
            axes = self.method.state_axes.get(name, "")
            value = resize_lists(kept[name], axes, min(layer.view.shape))
            state[name] = along_axes(value, axes, turns).to(like.dtype)
        return state

    def _read_state(self, layer: Layer, device: torch.device, digests: dict[str, str]) -> State:
        """Read the state of a layer that an earlier merge kept, which is empty if it kept none, and
        note its digest.
        """
        kept = self.plan.state
        state: State = {}
        if kept is None:
            return state
        digest_of_state = ""
        for name, (_, param, like) in state_tensors(self.plan, layer).items():
            if param in kept.keys:
                value, digest_of_value = kept.source.read(kept.keys[param], device)
                # A method may write to it, and what lies in memory is the caller's.
                state[name] = value.to(like.dtype, copy=kept.source.in_memory)
                digest_of_state += digest_of_value
        if state:
            digests["state"] = digest_of_state
        return state

    def _weight_so_far(
        self, layer: Layer, theta_0: Tensor, kept: State, digests: dict[str, str]
    ) -> Tensor:
        """Return the merged weight before the first task, in float32 at least, and note the digest
        of what is read.
        """
        plan = self.plan
        so_far = theta_0
        if plan.merged is not None:
            like = layer.view.part(theta_0)
            if not kept:
                weight, digests["merged"] = plan.merged.weight(layer.param, like)
            else:
                weight = kept["weight"]
                info = plan.merged.source.tensors[plan.merged.keys[layer.param]]
                rounded = weight.to(FLOATS[info.dtype])
                stored, digests["merged"] = plan.merged.weight(layer.param, rounded)
                assert isinstance(stored, Tensor)
                # The model has the same weight rounded, which tells a state of other weights.
                if rounded.dtype.itemsize < weight.dtype.itemsize:
                    assert plan.state is not None
                    check_belongs(weight, stored, layer.name, plan.state.source)
            assert isinstance(weight, Tensor)
            so_far = layer.view.matrix(weight)
        # A task would be rounded with it: the result is rounded once, when it is written.
        return so_far.to(compute_dtype(theta_0))

    def base_dtype(self, merged: MergedLayer[Layer]) -> torch.dtype:
        if isinstance(merged, LayerInBasis):
            return merged.theta_0.dtype  # of zeros
        # It is computed in the dtype of the result.
        stored = FLOATS[self.plan.base.tensors[merged.layer.keys[0]].dtype]
        return coarser_dtype(merged.theta_0.dtype, stored)

    def task_name(self, number: int) -> str:
        return self.plan.tasks[number].source.name

    def read_task(self, number: int, merged: MergedLayer[Layer]) -> Tensor | LowRank | None:
        layer = merged.layer
        task = self.plan.tasks[number]
        if isinstance(merged, LayerInBasis):
            return merged.factors.get(number)
        if layer.param not in task.params:
            return None
        theta_0 = layer.view.part(merged.theta_0)
        weight, merged.record["read"][f"task {number}"] = task.weight(layer.param, theta_0)
        if isinstance(weight, LowRank):
            return weight
        return layer.view.matrix(weight)

    def weighted(
        self, number: int, merged: MergedLayer[Layer], weight: Tensor | LowRank
    ) -> Tensor | LowRank:
        if isinstance(merged, LayerInBasis):
            return weight  # all factors were read, and weighted, with their basis
        return self.plan.tasks[number].at_strength(weight, merged.theta_0)

    def as_stored(self, merged: MergedLayer[Layer], weight: Tensor) -> Tensor:
        layer = merged.layer
        if self.plan.is_adapter:
            return weight
        if isinstance(merged, LayerInBasis):
            weight = self._on_base(merged, weight)
        return layer.view.part(weight)

    def _on_base(self, merged: LayerInBasis[Layer], update: Tensor) -> Tensor:
        """Return the weight ``(d_o, d_i)`` that an update in the basis makes of the base's, which
        is read here.
        """
        layer = merged.layer
        stored, merged.record["read"]["base"] = self.plan.base.read(layer.keys[0], update.device)
        theta_0 = layer.view.matrix(stored).to(update.dtype)
        factors = merged.basis.product(update)
        return torch.addmm(theta_0, factors.left, factors.right)

    def digests_read(self, layer: Layer) -> dict[str, str]:
        """Return the digests of what a layer is made from, by the model's role in the merge."""
        before = self.read(layer, torch.device("cpu"))
        digests: dict[str, str] = before.record["read"]
        if isinstance(before, LayerInBasis):
            if self.plan.is_adapter:
                return digests
            # Its tasks are read before the base.
            theta_0, digests["base"] = self.plan.base.read(layer.keys[0])
        else:
            theta_0 = layer.view.part(before.theta_0)
            for number, task in enumerate(self.plan.tasks):
                if layer.param in task.params:
                    _, digests[f"task {number}"] = task.weight(layer.param, theta_0)
        # Any weight does: what is read for new tokens does not depend on it.
        self.plan.vocabulary.grown_layer(layer.param, to_compute_dtype(theta_0).cpu(), digests)
        return digests


def shape_in_basis(plan: Plan, layer: Layer) -> tuple[int, int] | None:
    """Return the shape of a layer in the basis of its tasks' factors, in which it is merged, or
    None for one that is merged as it is.
    """
    sides = plan.method.sides_in_basis
    is_begun = plan.merged is not None or plan.state is not None
    if "o" not in sides or (is_begun and not plan.is_adapter):
        return None
    num_directions = 0
    for task in plan.tasks:
        rank = task.rank_of(layer.param)
        if rank is None:
            return None
        num_directions += rank
    d_o, d_i = layer.view.shape
    if plan.is_adapter:
        outputs, inputs = earlier_directions(plan, layer)
        d_o = min(d_o, num_directions + outputs)
        if "i" in sides:
            d_i = min(d_i, num_directions + inputs)
        return d_o, d_i
    # With as many directions as the layer, a basis saves nothing.
    if not 0 < num_directions < min(d_o, d_i):
        return None
    return num_directions, num_directions if "i" in sides else d_i


#: The keys of the bases in which the state of a layer is kept beside an adapter.
OUTPUTS = "%s.outputs"
INPUTS = "%s.inputs"


def earlier_directions(plan: Plan, layer: Layer) -> tuple[int, int]:
    """Return the numbers of the directions of outputs and inputs that the tasks of a merged adapter
    have in a layer.
    """
    if plan.state is not None and OUTPUTS % layer.name in plan.state.params:
        outputs = plan.state.params[OUTPUTS % layer.name][1]
        inputs = plan.state.params.get(INPUTS % layer.name, (0, outputs))[1]
        return outputs, inputs
    rank = plan.merged.rank_of(layer.param) if plan.merged is not None else 0
    return rank or 0, rank or 0


def _of_one_rank(left: Tensor, right: Tensor) -> LowRank:
    """Return two matrices ``(d_o, m)`` and ``(n, d_i)`` as factors, with zeros where one of them
    has fewer directions.
    """
    rank = max(left.shape[1], len(right))
    left = pad(left, (0, rank - left.shape[1]))
    return LowRank(left, pad(right, (0, 0, 0, rank - len(right))))


def measure_strengths(plan: Plan) -> list[float]:
    """Return the strengths of a plan's tasks, whose weights must be on this machine."""
    return [strength_of(plan.base, plan.layers, task) for task in plan.tasks]


def strength_of(base: Source, layers: Sequence[Layer], task: ModelWeights) -> float:
    """Return the strength of a task, given all layers to merge, between a half and 1."""
    shapes = [layer.view.shape for layer in layers]

    def measure_strength(task: ModelWeights) -> float:
        return task_strength(layers, shapes, partial(_spectrum_of, base, task))

    # On one thread, as layers are solved: an eigenvalue solver has other bits on several.
    (strength,) = map_layers(measure_strength, [task], torch.device("cpu"), workers=1)
    return strength


@torch.no_grad()
def _spectrum_of(base: Source, task: ModelWeights, layer: Layer) -> Spectrum | None:
    """Return the spectrum of what a task changed in a layer, or None if it does not have it."""
    if layer.param not in task.params:
        return None
    if task.rank_of(layer.param) is not None:
        factors, _ = task.weight(layer.param, torch.empty(0, dtype=torch.float32, device="cpu"))
        # Factors have not been rounded to the digits of a whole weight.
        return spectrum(factors, rounding=0.0)
    theta_0, _ = base.read(layer.keys[0])
    new, _ = task.weight(layer.param, theta_0)
    assert isinstance(new, Tensor)
    rounding = 0.0
    if layer.param in task.keys:
        spacing = relative_spacing(task.source.tensors[task.keys[layer.param]])
        rounding = rounding_energy(new, spacing)
    tau = to_compute_dtype(new) - to_compute_dtype(theta_0)
    return spectrum(layer.view.matrix(tau), rounding)


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
    state_bytes = 0
    for layer in keeping.layers:
        if has_state(keeping, layer):
            state_bytes += sum(like.nbytes for _, _, like in state_tensors(keeping, layer).values())
    state_bytes += sum(like.nbytes for like in means_to_keep(keeping).values())
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
    _, state_file = state_layout(plan)
    for tensors in (*plan.files.values(), state_file):
        for info in tensors.values():
            total += info.nbytes
    return total


def state_tensors(plan: Plan, layer: Layer) -> dict[str, tuple[str, str, Tensor]]:
    """Return for each tensor of a layer's state, by name, its key and param in the file, and a meta
    tensor like it.
    """
    if plan.is_adapter:
        return _state_tensors_in_basis(plan, layer)
    if plan.method.is_stateless:
        key = layer.keys[0]
        return {"weight": (key, layer.param, _wide_like(plan, key))}
    shape = (1, *layer.view.shape)
    # On meta, a method tells the shapes of its state and takes no memory for it.
    base = torch.empty(shape, dtype=plan.dtype(layer.keys[0]), device="meta")
    tensors = {}
    for name, value in plan.method.init_state([layer.name], base).items():
        key = f"{layer.name}.{name}"
        tensors[name] = (key, key, value[0])
    return tensors


def _state_tensors_in_basis(plan: Plan, layer: Layer) -> dict[str, tuple[str, str, Tensor]]:
    """Return the same for a layer of an adapter, whose state has the bases in which it is given
    and is kept under the layer's name.
    """
    shape = shape_in_basis(plan, layer)
    assert shape is not None
    d_o, d_i = layer.view.shape
    base = torch.empty((1, *shape), dtype=torch.float32, device="meta")
    # A list of directions has as many as all tasks can have filled.
    length = min(d_o, d_i, plan.last_step * min(shape))
    tensors = {}
    for name, value in plan.method.init_state([layer.name], base).items():
        key = f"{layer.name}.{name}"
        like = resize_lists(value[0], plan.method.state_axes.get(name, ""), length)
        tensors[name] = (key, key, like)
    outputs = torch.empty((d_o, shape[0]), dtype=torch.float32, device="meta")
    tensors["outputs"] = (OUTPUTS % layer.name, OUTPUTS % layer.name, outputs)
    if "i" in plan.method.sides_in_basis:
        inputs = torch.empty((d_i, shape[1]), dtype=torch.float32, device="meta")
        tensors["inputs"] = (INPUTS % layer.name, INPUTS % layer.name, inputs)
    return tensors


def check_state_in_basis(plan: Plan, name: str) -> list[str]:
    """Check that the method can go on from the state beside the merged adapter of this name."""
    assert plan.merged is not None
    method = plan.method
    missing = []
    for layer in plan.layers:
        if plan.merged.rank_of(layer.param):
            for key, _, _ in state_tensors(plan, layer).values():
                if plan.state is None or key not in plan.state.keys:
                    missing.append(key)
    if not missing:
        return []
    if not method.is_stateless:
        raise ValueError(
            f"the merged adapter '{name}' has no '{missing[0]}' in {STATE_FILE}: {method.label} "
            "goes on from its own merges of the same layers only; merge its tasks again, or all at "
            "once with the new ones"
        )
    before = plan.before.get("settings", {})
    if before.get("rank") is not None or before.get("dtype", "auto") not in ("auto", "float32"):
        return [f"'{name}' was cut or rounded, and {method.label} goes on from what is left"]
    return []


def has_state(plan: Plan, layer: Layer) -> bool:
    """Tell whether a layer has a state that the result's weight does not tell by itself."""
    if plan.is_adapter and plan.method.is_stateless:
        return plan.settings.rank is not None or plan.settings.dtype in ("bfloat16", "float16")
    return not plan.method.is_stateless or plan.rounds(layer.keys[0])


def mean_key(param: str) -> str:
    """Return the key of the running mean of a tensor outside the layers."""
    return f"{param}.mean"


def means_to_keep(plan: Plan) -> dict[str, Tensor]:
    """Return a meta tensor for each running mean that the model alone would round, by param."""
    if plan.targets.other_params != "mean" or plan.is_adapter:
        return {}
    kept = {}
    for param, keys in plan.others.items():
        if param in plan.averaged and plan.rounds(keys[0]):
            kept[param] = _wide_like(plan, keys[0])
    return kept


def new_rows_to_keep(plan: Plan) -> dict[str, Tensor]:
    """Return a meta tensor for the rows of new tokens that the model alone would round, by param
    of the tensor that has them.
    """
    if plan.targets.other_params == "first" or not plan.vocabulary.tokens:
        return {}
    kept = {}
    for param in plan.vocabulary.params:
        if plan.rounds(plan.pretrained.keys[param]):
            shape = (len(plan.vocabulary.tokens), *plan.pretrained.params[param][1:])
            kept[param] = torch.empty(shape, dtype=torch.float32, device="meta")
    return kept


def _wide_like(plan: Plan, key: str) -> Tensor:
    dtype = torch.promote_types(plan.dtype(key), torch.float32)
    return torch.empty(plan.base.tensors[key].shape, dtype=dtype, device="meta")


def stored_keys(plan: Plan) -> dict[str, str]:
    """Return the keys of what is kept beside the merged model, by the keys that this merge has for
    the same tensors.
    """
    stored = plan.state.keys if plan.state else {}
    params = {}  # under which the state has each tensor, by the key that this merge has for it
    if plan.targets.other_params == "mean":
        params = {mean_key(param): mean_key(param) for param in plan.others}
    for layer in plan.layers:
        for key, param, _ in state_tensors(plan, layer).values():
            params[key] = param
    return {key: stored[param] for key, param in params.items() if param in stored}


def state_layout(plan: Plan) -> tuple[bytes, dict[str, TensorInfo]]:
    """Return the header and the tensors of the state's file, which are empty if there is none."""
    kept: dict[str, TensorInfo] = {}
    if plan.keeps_state:
        for layer in plan.layers:
            if has_state(plan, layer):
                for key, _, like in state_tensors(plan, layer).values():
                    kept[key] = describe(like)
        for param, like in means_to_keep(plan).items():
            kept[mean_key(param)] = describe(like)
        for param, like in new_rows_to_keep(plan).items():
            kept[new_rows_key(param)] = describe(like)
    if not kept:
        return b"", {}
    header = make_header(kept)
    return header, read_header(STATE_FILE, header)


def serialize_layer(
    plan: Plan,
    state_places: Mapping[str, TensorInfo],
    merged: MergedLayer[Layer],
    merged_weight: Callable[[], Tensor],
) -> list[memoryview]:
    """Return the bytes of a layer's state, if it is kept, and of its weight; note their places in
    its record.

    ``state_places`` has the places in the file of the state, by key; none if there is no such file.
    """
    layer = merged.layer
    record = merged.record
    weight = merged_weight()
    state = merged.state
    if state_places and isinstance(merged, LayerInBasis):
        state = _expanded_state(plan, merged, weight)
    weight = plan.vocabulary.grown_layer(layer.param, weight, record["read"])
    stored: list[tuple[TensorInfo, Tensor]] = []
    if state_places:
        for key, value in state_to_keep(plan, layer, state).items():
            if key in state_places:
                stored.append((state_places[key], value.cpu()))
    rows_place = state_places.get(new_rows_key(layer.param))
    if rows_place is not None:
        stored.append((rows_place, plan.vocabulary.new_rows(layer.param)))
    if plan.is_adapter:
        assert isinstance(merged, LayerInBasis)
        weights = factors_by_key(plan, layer.param, merged.basis.product(weight), record)
    else:
        weights = dict.fromkeys(layer.keys, weight)
    for key, wide in weights.items():
        place = plan.places[key]
        value = wide.to(FLOATS[place.dtype])
        # A weight that is finite in float32 may be infinite in float16, which the engine can't see.
        if not is_finite(value):
            raise ValueError(f"tensor '{key}': the merged weight is too large for {place.dtype}")
        stored.append((place, value.cpu()))
    written = []
    pieces = []
    for place, value in stored:
        # Of what is to be written: a run that goes on compares it with what is on the disk.
        written.append((place.file, place.start, place.stop, digest(value)))
        pieces.append(raw_bytes(value))
    record["written"] = written
    return pieces


def factors_by_key(plan: Plan, param: str, update: LowRank, record: Record) -> dict[str, Tensor]:
    """Return A and B of an update in an adapter, by their keys in it, in the rank that it has
    there; note the energies of what stays and of the whole.
    """
    key_a, key_b = plan.adapter_keys[param]
    factors, record["energy"] = best_factors(update, plan.places[key_a].shape[0])
    # Of an embedding, they are those of the transpose.
    if key_a.endswith(EMBEDDING_A):
        return {key_a: factors.left.mT, key_b: factors.right.mT}
    return {key_a: factors.right, key_b: factors.left}


def _expanded_state(plan: Plan, merged: LayerInBasis[Layer], weight: Tensor) -> State:
    """Return the state of a layer in a basis as that of the layer itself, whose merged weight is
    given as it is stored.
    """
    layer = merged.layer
    axes = plan.method.state_axes
    state = {}
    if plan.is_adapter:
        bases = {"outputs": merged.basis.outputs, "inputs": merged.basis.inputs}
        for name, (_, _, like) in state_tensors(plan, layer).items():
            value = bases[name] if name in bases else merged.state[name]
            assert value is not None
            if "k" in axes.get(name, ""):
                value = resize_lists(value, axes[name], like.shape[axes[name].index("k")])
            state[name] = value
        return state
    if plan.method.is_stateless:
        return {"weight": layer.view.matrix(weight)}
    for name, (_, _, like) in state_tensors(plan, layer).items():
        value = merged.basis.expand(merged.state[name], axes.get(name, ""))
        state[name] = value.to(like.dtype)
    return state


def state_to_keep(plan: Plan, layer: Layer, state: State) -> dict[str, Tensor]:
    """Return the tensors of a layer's state by their keys in the file, whose shapes and dtypes they
    must have.
    """
    tensors = {}
    for name, (key, _, like) in state_tensors(plan, layer).items():
        value = state[name]
        if plan.method.is_stateless and not plan.is_adapter:
            value = layer.view.part(value).to(like.dtype)
        # The header of the file is made from the state that a method starts with: no other fits.
        if value.shape != like.shape or value.dtype != like.dtype:
            raise ValueError(
                f"method {plan.method.name}, layer '{layer.name}': '{name}' of its state is "
                f"{value.dtype} {tuple(value.shape)} after the last task and was "
                f"{like.dtype} {tuple(like.shape)} before the first"
            )
        tensors[key] = value
    return tensors
