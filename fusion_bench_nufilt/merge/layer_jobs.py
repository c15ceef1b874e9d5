"""The jobs that merge the layers of a plan: how these are read from its models, in how much memory,
and how they are written with what the next merge needs (:mod:`.kept_state`).
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from fusion_bench_nufilt.methods.base import State
from fusion_bench_nufilt.models.layers import Layer
from fusion_bench_nufilt.models.model import ModelWeights
from fusion_bench_nufilt.models.source import check_belongs
from fusion_bench_nufilt.nufilt.low_rank import LowRank
from fusion_bench_nufilt.nufilt.noise import rounding_of
from fusion_bench_nufilt.utils.devices import free_memory, process_memory, workers_on
from fusion_bench_nufilt.utils.tensors import (
    FLOATS,
    TensorInfo,
    compute_dtype,
    in_dtype,
)

from .basis import Basis, LayerInBasis, best_factors
from .engine import (
    Budget,
    Job,
    LayerInProgress,
    Machine,
    Pieces,
    TaskInput,
    memory_limit,
    rounding_before,
    working_memory,
)
from .kept_state import KeptState
from .output import Record
from .plan import Plan
from .strength import strength_of

log = logging.getLogger(__name__)

#: On an accelerator, layers of equal shape are solved together within about this much memory.
BATCH_BYTES = 4 * 2**30


def machine_of(plan: Plan, workers: int | None = None) -> Machine:
    """Return where a plan is carried out, by default with this process's workers."""
    settings = plan.settings
    workers = workers or workers_on(settings.devices)
    free = None
    if settings.max_memory is not None:
        free = settings.max_memory - process_memory(workers)
    return Machine(settings.devices, workers, free, BATCH_BYTES)


def layer_jobs(
    kept: KeptState,
    layers: Sequence[Layer] | None = None,
    strengths: Sequence[float] | None = None,
    places: Mapping[str, TensorInfo] | None = None,
) -> list[Job]:
    """Return the jobs that merge layers of a plan, by default all, in their order; nothing is read
    for this.

    ``strengths`` are those of the tasks, and ``places`` those of what is written, by key in the
    result or in the state. What is kept of one is described once for each ``kept``, of which a
    merge has one.
    """
    plan = kept.plan
    strengths = strengths or [1.0] * len(plan.tasks)
    # What is quantised is decoded by scales in float32.
    widens_tasks = any(task.coefficient != 1 for task in plan.tasks)
    for model in plan.models.values():
        widens_tasks |= any(info.is_quantised for info in model.source.tensors.values())
    jobs = []
    for layer in plan.layers if layers is None else layers:
        in_basis = kept.shape_in_basis(layer)
        tasks = []
        for number, task in enumerate(plan.tasks):
            name = task.source.name
            if in_basis is None:
                read = partial(_read_task, task, layer)
                tasks.append(TaskInput(name, read, strengths[number], task.coefficient))
            else:  # which has been multiplied
                tasks.append(TaskInput(name, partial(_factors_of, number), strengths[number]))
        shape = in_basis or layer.view.shape
        dtype = plan.dtype(layer.keys[0])
        stored = _stored_memory(kept, layer, in_basis)
        solving = stored + working_memory(
            plan.method,
            shape,
            max(4, dtype.itemsize),
            plan.settings.devices[0],
            widens_tasks=widens_tasks,
        )
        jobs.append(
            Job(
                name=layer.name,
                rule=plan.method,
                shape=layer.view.shape,
                shape_merged=shape,
                dtypes=(dtype,),
                read=partial(_read if in_basis is None else _read_in_basis, kept, layer),
                tasks=tasks,
                first_step=plan.first_step,
                pieces=partial(_pieces, kept, layer, places or {}),
                # On a GPU, a layer only passes through main memory.
                memory=solving if plan.settings.on_cpu else stored,
                solving_memory=solving,
            )
        )
    return jobs


def task_strengths(kept: KeptState) -> Sequence[float]:
    """Return the strengths of a plan's tasks, which are measured if its method asks for them."""
    plan = kept.plan
    if not plan.method.weighs_tasks:
        return [1.0] * len(plan.tasks)
    machine = machine_of(plan)
    workers = machine.workers if plan.settings.on_cpu else len(machine.devices)
    # No layer is merged meanwhile, whose memory this may take.
    jobs = layer_jobs(kept)
    budget = Budget(memory_limit(jobs, machine))
    memory = {job.name: job.memory for job in jobs}

    def reserve(layer: Layer) -> AbstractContextManager[None]:
        return budget.reserve(memory[layer.name])

    layers = plan.layers_of_model or plan.layers
    strengths = []
    for task in plan.tasks:
        strength = strength_of(plan.pretrained, layers, task, machine.devices, workers, reserve)
        strengths.append(strength)
    return strengths


def _stored_memory(kept: KeptState, layer: Layer, in_basis: tuple[int, int] | None) -> int:
    """Return the bytes of a layer's weights and state as they are read, given the shape in which it
    is merged in a basis, if it is.
    """
    plan = kept.plan
    numel = math.prod(layer.view.shape)
    base_itemsize = plan.dtype(layer.keys[0]).itemsize
    state_bytes = sum(like.nbytes for like in kept.of_layer(layer).values())
    if in_basis is not None:
        # The factors with their basis; at the end the base, widened, and its sum with the update.
        wide_itemsize = max(4, base_itemsize)
        factors = 4 * wide_itemsize * in_basis[0] * sum(layer.view.shape)
        if not plan.keeps_state:
            state_bytes = 0
        if layer.param in plan.adapter_keys:
            # Decomposed in float64, with all that this takes.
            return factors + 5 * 8 * in_basis[0] * sum(layer.view.shape) + state_bytes
        last_product = (base_itemsize + 2 * wide_itemsize) * numel
        # The state with the layer's own sides, and once more as it is written, beside the weight.
        writing = (base_itemsize + wide_itemsize) * numel + 2 * state_bytes
        return factors + max(last_product + state_bytes, writing)
    # One task's weight is held at a time. The factors of a LoRA are too thin to count.
    task_itemsize = 0
    for task in plan.tasks:
        info = task.info(layer.param)
        if info is not None:
            task_itemsize = max(task_itemsize, FLOATS[info.dtype].itemsize)
    return (base_itemsize + task_itemsize) * numel + state_bytes


def _read(kept: KeptState, layer: Layer, job: Job, device: torch.device) -> LayerInProgress:
    plan = kept.plan
    key = layer.keys[0]
    weight = plan.base.read(key, device)
    theta_0 = layer.view.matrix(weight.to(plan.dtype(key)))
    state = kept.read(layer, device)
    if not plan.method.keeps_sums:
        state = {"weight": _weight_so_far(plan, layer, theta_0, state)}
    elif not state:
        state = plan.method.state_of(layer.name, theta_0)
    rounding_of_base = 0.0
    # The base is computed in the dtype of the result.
    if theta_0.dtype.itemsize < FLOATS[plan.base.tensors[key].dtype].itemsize:
        rounding_of_base = rounding_of(theta_0)
    return LayerInProgress(
        job,
        theta_0,
        state,
        _record(layer),
        rounding=_rounding_before(kept, layer, theta_0, state),
        rounding_of_base=rounding_of_base,
    )


def _record(layer: Layer) -> Record:
    return {"param": layer.param, "written": [], "reports": []}


def _rounding_before(kept: KeptState, layer: Layer, theta_0: Tensor, state: State) -> float:
    """Return what rounding has added to a layer in earlier merges."""
    plan = kept.plan
    if plan.merged is None:
        return 0.0
    recorded = plan.merged_manifest.get("rounding", {}).get(layer.name)
    if recorded is None:
        # What has no manifest is one model.
        num_tasks = max(plan.first_step - 1, plan.merged_manifest.get("step", 1))
        return rounding_before(theta_0, state.get("weight", theta_0), num_tasks)
    if kept.has_state(layer) or "weight" not in state:
        return recorded
    # The model that was left may have been rounded, whatever its tasks are.
    return max(recorded, 2 * rounding_of(state["weight"]))


def _read_in_basis(kept: KeptState, layer: Layer, job: Job, device: torch.device) -> LayerInBasis:
    """Read the factors of all tasks, and return the layer in their basis, on a base of zeros."""
    plan = kept.plan
    wide = torch.promote_types(plan.dtype(layer.keys[0]), torch.float32)
    factors = {}
    for number, task in enumerate(plan.tasks):
        if task.entries[layer.param].rank:
            factors[number] = task.factors(layer.param, device).to(wide)
    all_lefts = [update.left for update in factors.values()]
    all_rights = [update.right for update in factors.values()]
    earlier = kept.read_in_basis(layer, device)
    if earlier:
        all_lefts.append(earlier["outputs"])
    if "inputs" in earlier:
        all_rights.append(earlier["inputs"].mT)
    basis, lefts, rights = Basis.of(all_lefts, all_rights, plan.method.sides_in_basis)
    zeros = torch.zeros(job.shape_merged, dtype=wide, device=device)
    state = plan.method.state_of(layer.name, zeros)
    if earlier:
        bases = {"o": lefts[-1]}
        if "inputs" in earlier:
            bases["i"] = rights[-1].mT
        state = kept.turn(layer, earlier, state, bases)
    in_basis = {}
    for number, left, right in zip(factors, lefts, rights, strict=False):
        in_basis[number] = LowRank(left.contiguous(), right.contiguous())
    # Factors have no rounding of their own.
    rounding = plan.merged_manifest.get("rounding", {}).get(layer.name) or 0.0
    return LayerInBasis(job, zeros, state, _record(layer), basis, in_basis, rounding=rounding)


def _weight_so_far(plan: Plan, layer: Layer, theta_0: Tensor, kept: State) -> Tensor:
    """Return the merged weight before the first task, in float32 at least."""
    so_far = theta_0
    if plan.merged is not None:
        like = layer.view.as_stored(theta_0)
        if kept:
            like = layer.view.as_stored(kept["weight"])
            like = like.to(plan.merged.entries[layer.param].dtype)
        stored = plan.merged.entries[layer.param].read(like)
        assert isinstance(stored, Tensor)
        so_far = layer.view.matrix(stored)
        if kept:
            assert plan.state is not None
            check_belongs(kept["weight"], so_far, layer.name, plan.state.source)
            so_far = kept["weight"]
    # A task would be rounded with it: the result is rounded once, when it is written.
    return so_far.to(compute_dtype(theta_0))


def _read_task(
    task: ModelWeights, layer: Layer, merged: LayerInProgress
) -> Tensor | LowRank | None:
    entry = task.entries[layer.param]
    if entry.rank == 0:
        return None  # which leaves the merged weight as it is
    weight = entry.read(layer.view.as_stored(merged.theta_0))
    if isinstance(weight, LowRank):
        return weight
    return layer.view.matrix(weight)


def _factors_of(number: int, merged: LayerInProgress) -> LowRank | None:
    assert isinstance(merged, LayerInBasis)
    return merged.factors.get(number)


def _pieces(
    kept: KeptState,
    layer: Layer,
    places: Mapping[str, TensorInfo],
    merged: LayerInProgress,
    merged_weight: Callable[[], Tensor],
) -> Pieces:
    """Yield a layer's state, if one is kept, and its weight, where it has a place."""
    plan = kept.plan
    weight = None
    # That of a step that nobody reads is not computed, unless it is the state.
    if not plan.method.keeps_sums or layer.keys[0] in places or layer.param in plan.adapter_keys:
        weight = merged_weight()
        if layer.param not in plan.adapter_keys:
            weight = _full_weight(plan, layer, merged, weight)
    for key, value in kept.by_key(layer, merged, weight).items():
        yield places[key], value
    if weight is None:
        return
    if layer.param in plan.adapter_keys:
        yield from pieces_of_factors(plan, merged, weight, places)
        return
    if layer.param in plan.vocabulary.grown:
        weight = plan.vocabulary.grown[layer.param].grow(weight)
    for key in layer.keys:
        if key in places:
            yield places[key], in_dtype(key, weight, FLOATS[places[key].dtype])


def _full_weight(plan: Plan, layer: Layer, merged: LayerInProgress, weight: Tensor) -> Tensor:
    """Return the merged weight of a layer in the form in which the base has it."""
    if isinstance(merged, LayerInBasis):
        # The base is read here.
        stored = plan.base.read(layer.keys[0], weight.device)
        theta_0 = layer.view.matrix(stored).to(weight.dtype)
        factors = merged.basis.product(weight)
        weight = torch.addmm(theta_0, factors.left, factors.right)
    return layer.view.as_stored(weight)


def pieces_of_factors(
    plan: Plan, merged: LayerInProgress, weight: Tensor, places: Mapping[str, TensorInfo]
) -> Pieces:
    """Yield A and B of an update in an adapter, given it in the basis in which it was merged, in
    the rank that it has there; note the energies of what stays and of the whole.
    """
    assert isinstance(merged, LayerInBasis)
    record = merged.record
    keys_of_names = plan.adapter_keys[record["param"]]
    rank = places[keys_of_names[0].a].shape[0]
    factors, record["energy"] = best_factors(merged.basis.product(weight), rank)
    for keys in keys_of_names:
        values = {keys.a: factors.right, keys.b: factors.left}
        if keys.of_embedding:
            values = {keys.a: factors.left.mT, keys.b: factors.right.mT}
        for key, value in values.items():
            yield places[key], in_dtype(key, value, FLOATS[places[key].dtype])


def peak_memory(plan: Plan, workers: int | None = None) -> int:
    """Predict the peak resident memory of a process in bytes, by default with this process's
    workers.
    """
    machine = machine_of(plan, workers)
    return process_memory(machine.workers) + memory_limit(layer_jobs(KeptState(plan)), machine)


def affords_state(plan: Plan, device: torch.device) -> bool:
    """Tell whether a device has room for what a merge of models in its memory would round to their
    dtype after each task, in float32, and say so if it has not.
    """
    settings = dataclasses.replace(plan.settings, state=True)
    keeping = dataclasses.replace(plan, settings=settings)
    state_bytes = sum(like.nbytes for like in KeptState(keeping).needed().values())
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
