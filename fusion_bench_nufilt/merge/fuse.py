"""Merge matrices that are in memory: the public function on tensors."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusion_bench_nufilt.methods.base import LayerMethod, State
from fusion_bench_nufilt.methods.nufilt import Nufilt
from fusion_bench_nufilt.nufilt.low_rank import LowRank
from fusion_bench_nufilt.nufilt.options import FusionConfig
from fusion_bench_nufilt.nufilt.step import LayerReport
from fusion_bench_nufilt.utils.devices import Devices, check_devices, workers_on
from fusion_bench_nufilt.utils.tensors import compute_dtype, is_finite

from .basis import Basis
from .engine import (
    Job,
    LayerInProgress,
    Machine,
    Pieces,
    TaskInput,
    do_jobs,
    rounding_before,
    working_memory,
)

Layers = Mapping[str, Tensor]
TaskLayers = Mapping[str, Tensor | LowRank]


def matrix_jobs(
    rule: LayerMethod,
    pretrained: Layers,
    tasks: Sequence[TaskLayers],
    *,
    states: Mapping[str, State] | None = None,
    first_step: int = 1,
    strengths: Sequence[float] | None = None,
    coefficients: Sequence[float] | None = None,
    device: torch.device | None = None,
) -> list[Job]:
    """Return the jobs that merge matrices, which have their names and are in memory; what is merged
    of one is written to its name.

    ``states`` are those before the first task, by name, and ``coefficients`` what the update of
    each task is multiplied by. It takes no plan, which is of models: these have names that are
    tied, heads, tensors outside the layers and files, and matrices have none of them.
    """
    strengths = strengths or [1.0] * len(tasks)
    coefficients = coefficients or [1.0] * len(tasks)
    device = device or device_of(pretrained)
    jobs = []
    for name, weight in pretrained.items():
        d_o, d_i = weight.shape
        inputs = []
        for task, strength, coefficient in zip(tasks, strengths, coefficients, strict=True):
            read = partial(_read_task, task[name])
            inputs.append(TaskInput("task", read, strength, coefficient))
        state = states[name] if states is not None else None
        # A stack has one dtype: no layer may have other bits for the sake of its company.
        dtypes = [value.dtype for value in (state or {}).values()]
        itemsize = compute_dtype(weight).itemsize
        working = working_memory(
            rule,
            (d_o, d_i),
            itemsize,
            device,
            widens_tasks=any(coefficient != 1 for coefficient in coefficients),
        )
        jobs.append(
            Job(
                name=name,
                rule=rule,
                shape=(d_o, d_i),
                shape_merged=(d_o, d_i),
                dtypes=(weight.dtype, *dtypes),
                read=partial(_read, weight, state),
                tasks=inputs,
                first_step=first_step,
                pieces=lambda merged, merged_weight: [(merged.job.name, merged_weight())],
                memory=0,  # they are there already
                # The base, the merged weight so far and the task.
                solving_memory=3 * weight.nbytes + working,
            )
        )
    return jobs


def _read(theta_0: Tensor, kept: State | None, job: Job, device: torch.device) -> LayerInProgress:
    theta_0 = theta_0.detach().to(device)
    if kept is None:
        state = job.rule.state_of(job.name, theta_0)
    else:
        state = {key: value.detach().to(device) for key, value in kept.items()}
    merged = LayerInProgress(job, theta_0, state, {"param": job.name, "reports": []})
    if job.first_step > 1:
        so_far = state.get("weight", theta_0)
        merged.rounding = rounding_before(theta_0, so_far, job.first_step - 1)
    return merged


def _read_task(weight: Tensor | LowRank, merged: LayerInProgress) -> Tensor | LowRank:
    if not isinstance(weight, LowRank):
        weight = weight.detach()
    return weight.to(merged.theta_0.device)


def device_of(layers: Layers) -> torch.device:
    """Return the device of the first of some layers."""
    return next((weight.device for weight in layers.values()), torch.device("cpu"))


def machine_on(device: Devices, batch_bytes: int = 2**30) -> Machine:
    """Return the machine that merges matrices on a device, or several of one kind."""
    devices = check_devices(device)
    return Machine(devices, workers_on(devices), batch_bytes=batch_bytes)


def fuse_layers(
    pretrained: TaskLayers,
    merged: TaskLayers,
    task: TaskLayers,
    config: FusionConfig,
    *,
    seed: int = 42,
    step: int = 1,
    lora_A: Layers | None = None,
    progress: Callable[[str], object] | None = None,
    device: Devices | None = None,
    batch_bytes: int = 2**30,
) -> tuple[dict[str, Tensor | LowRank], dict[str, LayerReport]]:
    r"""Merge one more task into every layer by itself: :math:`W \leftarrow W + \tau (P + B A)`, in
    float32 at least.

    A layer into which nothing has been merged so far takes the task's weight as
    ``config.first_task`` says.

    Args:
        pretrained: :math:`\theta_0`, weights ``(d_o, d_i)`` by layer name. Where a layer's update
            alone is wanted, it is given by factors of rank 0.
        merged: the merged model so far; :math:`\theta_0` before the first task. Where
            :math:`\theta_0` is given by factors, so are this and the task's, and so is the new one,
            of the sum of their ranks.
        task: the new fine-tuned model. A layer may be given by the factors of its update
            (:class:`LowRank`), which is faster where they are thin.
        config: the hyper-parameters.
        seed: the seed of the run. With the step and the layer's name it decides the initial A.
        step: the number of the task in the stream.
        lora_A: initial A ``(lora_rank, d_i)`` by layer name, instead of drawn ones.
        progress: a function that is called with the name of each finished layer.
        device: where to compute, by default where ``merged`` is. Each of several devices of one
            kind takes the next layers when it is free, and the result is the same.
        batch_bytes: on an accelerator, layers of equal shape are solved together within about this
            much memory; on a CPU each thread takes one layer at a time.

    Returns:
        The new weights, with names, order, dtypes and devices of ``merged``, and a report for each
        layer. The arguments are not changed.

    Raises:
        ValueError: the models do not fit or hold non-finite values (the message names the model,
            the layer and the shapes); a device cannot be used or has no room for a layer; devices
            are of several kinds.
    """
    bases: dict[str, Basis] = {}
    check_layers(pretrained, pretrained, model="pretrained")
    check_layers(pretrained, merged, model="merged")
    check_layers(pretrained, task, model="task")
    if lora_A is not None and config.has_adapter:
        _check_adapters(merged, lora_A, config)
    layer_shapes = {}
    for name, theta_0 in pretrained.items():
        d_o, d_i = theta_0.shape
        layer_shapes[name] = (d_o, d_i)
    whole, so_far, new = _in_bases(pretrained, merged, task, bases)
    machine = machine_on(device_of(so_far) if device is None else device, batch_bytes)
    rule = Nufilt(config, list(merged), seed, shapes=layer_shapes)
    rule.initial_adapters = lora_A
    jobs = matrix_jobs(
        rule,
        whole,
        [new],
        states={name: {"weight": weight} for name, weight in so_far.items()},
        first_step=step,
        device=machine.devices[0],
    )
    fused: dict[str, Tensor | LowRank] = {}
    reports: dict[str, LayerReport] = {}
    finished: deque[str] = deque()

    def add(record: Any, pieces: Pieces) -> None:
        for name, value in pieces:
            weight = value.to(so_far[name])
            fused[name] = bases[name].product(weight) if name in bases else weight
            (report,) = record["reports"]
            values = {key: report[key] for key in report if key != "step"}
            reports[name] = LayerReport(**{**values, "shape": layer_shapes[name]})
            # This is a worker's thread: the loop below tells the caller in the caller's own.
            finished.append(name)

    with closing(do_jobs(jobs, machine, add)) as merged_layers:
        for _ in merged_layers:
            while finished:
                name = finished.popleft()
                if progress is not None:
                    progress(name)
    # Layers finish in any order, and the result has that of the model.
    return {name: fused[name] for name in merged}, {name: reports[name] for name in merged}


def _in_bases(
    pretrained: TaskLayers, merged: TaskLayers, task: TaskLayers, bases: dict[str, Basis]
) -> tuple[dict[str, Tensor], dict[str, Tensor], TaskLayers]:
    """Return the three models, of which layers that are given by factors are in a basis of these,
    which is added to ``bases``.
    """
    matrices: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    new: dict[str, Tensor | LowRank] = {}
    for name, theta_0 in pretrained.items():
        theta = merged[name]
        theta_t = task[name]
        if isinstance(theta_0, Tensor) and isinstance(theta, Tensor):
            matrices[0][name] = theta_0
            matrices[1][name] = theta
            new[name] = theta_t
            continue
        factors = [each for each in (theta_0, theta, theta_t) if isinstance(each, LowRank)]
        if len(factors) < 3 or not any(each.rank for each in factors):
            raise ValueError(
                f"layer '{name}': where the pretrained or the merged weight is given by factors, "
                "so are both and the task's update, of at least one direction in all"
            )
        bases[name], lefts, rights = Basis.of(
            [each.left for each in factors], [each.right for each in factors], "o"
        )
        matrices[0][name] = lefts[0] @ rights[0]
        matrices[1][name] = lefts[1] @ rights[1]
        new[name] = LowRank(lefts[2].contiguous(), rights[2])
    return *matrices, new


def merge_matrices(
    rule: LayerMethod,
    pretrained: Layers,
    tasks: Sequence[TaskLayers],
    *,
    device: Devices | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Merge all tasks into all layers, and return the merged weights by name; the options are those
    of :func:`matrix_jobs`.
    """
    machine = machine_on(device_of(pretrained) if device is None else device)
    jobs = matrix_jobs(rule, pretrained, tasks, device=machine.devices[0], **options)
    merged: dict[str, Tensor] = {}

    def add(record: Any, pieces: Pieces) -> None:
        for name, weight in pieces:
            merged[name] = weight.to(pretrained[name])

    with closing(do_jobs(jobs, machine, add)) as merged_layers:
        for _ in merged_layers:
            pass
    return merged


def check_layers(reference: TaskLayers, layers: TaskLayers, *, model: str) -> None:
    """Raise a ValueError that names the model and the layer if it cannot be merged with the
    reference's.

    It is missing, unknown, not a matrix, of another shape, not floating point or not finite.
    """
    for name, weight in reference.items():
        if name not in layers:
            raise ValueError(
                f"model '{model}' lacks layer '{name}' {tuple(weight.shape)} of the pretrained "
                "model"
            )
        other = layers[name]
        label = f"model '{model}', layer '{name}'"
        matrices: list[Tensor] = []
        if isinstance(other, LowRank):
            matrices += [other.left, other.right]
        else:
            matrices.append(other)
        for matrix in matrices:
            if matrix.ndim != 2 or not matrix.is_floating_point():
                raise ValueError(
                    f"{label}: expected a floating-point matrix, got shape {tuple(matrix.shape)} "
                    f"of {matrix.dtype}"
                )
        if other.shape != weight.shape:
            raise ValueError(
                f"{label}: shape {tuple(other.shape)} differs from the pretrained model's "
                f"{tuple(weight.shape)}"
            )
        if not all(map(is_finite, matrices)):
            raise ValueError(f"{label}: the weight has NaN or infinite values")
    extra = layers.keys() - reference.keys()
    if extra:
        raise ValueError(
            f"model '{model}' has layers that the pretrained model lacks: {sorted(extra)}"
        )


def _check_adapters(layers: TaskLayers, lora_A: Layers, config: FusionConfig) -> None:
    for name, weight in layers.items():
        expected = (config.ranks(weight.shape[1]).lora, weight.shape[1])
        shape = None
        if name in lora_A:
            shape = tuple(lora_A[name].shape)
        if shape != expected:
            raise ValueError(f"lora_A of layer '{name}': expected shape {expected}, got {shape}")
