"""One merging step over the layers of a model: they are checked, grouped, solved side by side and
reported.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusion_bench_nufilt.utils.devices import (
    Devices,
    check_devices,
    fast_in_float64,
    map_on_devices,
    stack_size,
)
from fusion_bench_nufilt.utils.failures import (
    SteepSpectrumError,
    solve_alone,
    warn_once,
    why_it_failed,
)
from fusion_bench_nufilt.utils.tensors import is_finite, wide_dtype

from .config import FusionConfig
from .step import LowRank, fuse_stack, working_bytes

Layers = Mapping[str, Tensor]
TaskLayers = Mapping[str, Tensor | LowRank]


@dataclass(frozen=True)
class LayerReport:
    """What one step did to one layer."""

    shape: tuple[int, ...]  # (d_o, d_i)
    seconds: float  # wall time, shared evenly by layers that were solved together
    solving_seconds: float = 0.0  # the part of it that the solver took
    task_norm: float = 0.0  # Frobenius norm of the new task vector
    merged_norm: float = 0.0  # Frobenius norm of the cumulative update before this step
    protected_rank: float = (
        0.0  # number of directions in the filter: r_p clipped to the numerical rank
    )
    filtered_share: float = 0.0  # share of the squared norm of tau that the filter took, in [0, 1]
    overlap: float = 0.0  # affinity of the new task's subspace to the protected one, in [0, 1]
    loss_before: float = 0.0  # objective where BA = 0
    loss_after: float = 0.0  # objective of the fused adapter


Fused = tuple[str, Tensor, LayerReport]
"""The name, the new weight and the report of a layer."""


def fuse_layers(
    pretrained: Layers,
    merged: Layers,
    task: TaskLayers,
    config: FusionConfig,
    *,
    seed: int = 42,
    step: int = 1,
    lora_A: Layers | None = None,
    progress: Callable[[str], object] | None = None,
    device: Devices | None = None,
    batch_bytes: int = 2**30,
) -> tuple[dict[str, Tensor], dict[str, LayerReport]]:
    r"""Merge one more task into every layer by itself: :math:`W \leftarrow W + \tau (P + B A)`, in
    float32 at least.

    A layer into which nothing has been merged so far takes the task's weight as
    ``config.first_task`` says.

    Args:
        pretrained: :math:`\theta_0`, weights ``(d_o, d_i)`` by layer name.
        merged: the merged model so far; :math:`\theta_0` before the first task.
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
    fused: dict[str, Tensor] = {}
    reports: dict[str, LayerReport] = {}
    each = fuse_each(
        pretrained,
        merged,
        task,
        config,
        seed=seed,
        step=step,
        lora_A=lora_A,
        device=device,
        batch_bytes=batch_bytes,
    )
    for name, fused[name], reports[name] in each:
        if progress is not None:
            progress(name)
    return {name: fused[name] for name in merged}, {name: reports[name] for name in merged}


def fuse_each(
    pretrained: Layers,
    merged: Layers,
    task: TaskLayers,
    config: FusionConfig,
    *,
    seed: int = 42,
    step: int = 1,
    lora_A: Layers | None = None,
    device: Devices | None = None,
    batch_bytes: int = 2**30,
) -> Iterator[Fused]:
    """Do the work of :func:`fuse_layers`, and yield each layer as it is finished, layers of equal
    shape together.

    A layer of ``merged`` may be overwritten once it has been yielded.
    """
    check_layers(pretrained, pretrained, model="pretrained")
    check_layers(pretrained, merged, model="merged")
    check_layers(pretrained, task, model="task")
    if lora_A is not None and config.has_adapter:
        _check_adapters(merged, lora_A, config)
    devices = check_devices(device or next((weight.device for weight in merged.values()), "cpu"))
    fresh = frozenset(
        name for name, W in merged.items() if not (pretrained[name].to(W.device) != W).any()
    )
    fusion = _FusionStep(pretrained, merged, task, config, seed, step, lora_A, fresh)
    for solved in map_on_devices(fusion.solve, fusion.stacks(devices[0], batch_bytes), devices):
        yield from solved


@dataclass(frozen=True)
class _FusionStep:
    """The models of one step of the stream, and how stacks of their layers are solved.

    Closures that call each other would hold the models in a reference cycle until the garbage
    collector runs.
    """

    pretrained: Layers
    merged: Layers
    task: TaskLayers
    config: FusionConfig
    seed: int
    step: int
    adapters: Layers | None  # the initial A of each layer, if given
    fresh: frozenset[str]  # layers into which nothing has been merged so far

    def stacks(self, where: torch.device, batch_bytes: int) -> list[list[str]]:
        """Return the names of layers to solve together."""
        kinds: dict[tuple[torch.Size, torch.dtype, int | None, bool], list[str]] = defaultdict(list)
        for name, weight in self.merged.items():
            rank = task.rank if isinstance(task := self.task[name], LowRank) else None
            kinds[weight.shape, wide_dtype(weight), rank, name in self.fresh].append(name)
        stacks = []
        for (shape, dtype, *_), names in kinds.items():
            size = stack_size(working_bytes(shape, dtype.itemsize, self.config), where, batch_bytes)
            stacks += [names[i : i + size] for i in range(0, len(names), size)]
        return stacks

    def solve(self, names: list[str], where: torch.device) -> list[Fused]:
        """Solve a stack of layers on a device, or its halves if they fail together, down to single
        layers.
        """
        shape = tuple(self.merged[names[0]].shape)
        if len(names) == 1:
            attempts = (
                (str(where), partial(self.compute, names, where)),
                ("float64 on the CPU", partial(self.compute, names, torch.device("cpu"), True)),
            )
            return solve_alone(f"'{names[0]}' {shape}", where, attempts)
        try:
            return self.compute(names, where)
        except RuntimeError as error:
            reason = why_it_failed(error)
            if reason is None:
                raise
            is_steep = isinstance(error, SteepSpectrumError)
        if not is_steep:
            warn_once(
                "device '%s', %d layers of shape %s together: %s; halves take over, which changes "
                "them by rounding",
                *(where, len(names), shape, reason),
            )
        middle = len(names) // 2
        return [*self.solve(names[:middle], where), *self.solve(names[middle:], where)]

    @torch.no_grad()
    def compute(self, names: list[str], where: torch.device, exact: bool = False) -> list[Fused]:
        """Solve a stack of layers on a device, with decompositions in float64 if ``exact``, or if
        that is fast.
        """
        start = time.perf_counter()
        d_i, dtype = self.merged[names[0]].shape[1], wide_dtype(self.merged[names[0]])
        adapters = self.adapters or {
            name: _initial_A(name, d_i, self.config, self.seed, self.step) for name in names
        }

        def stack(layers: Mapping[str, Any]) -> Any:
            return _stack([layers[name] for name in names], where, dtype)

        # The stacks are bound to no names here, so that fuse_stack can free each one as soon as it
        # is done with it.
        weights, measures = fuse_stack(
            stack(self.pretrained),
            stack(self.merged),
            stack(self.task),
            stack(adapters) if self.config.has_adapter else None,
            self.config,
            fresh=names[0] in self.fresh,
            exact=exact or fast_in_float64(where),
        )
        rows = torch.stack(list(measures.values()), dim=-1).tolist()  # waits for an accelerator
        seconds = (time.perf_counter() - start) / len(names)
        fused = []
        for name, weight, row in zip(names, weights, rows, strict=True):
            like, values = self.merged[name], dict(zip(measures, row, strict=True))
            stored = weight.to(like.dtype).to(like.device)
            fused.append((name, stored, LayerReport(tuple(like.shape), seconds, **values)))
        return fused


def check_layers(reference: Layers, layers: TaskLayers, *, model: str) -> None:
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
        other, what = layers[name], f"model '{model}', layer '{name}'"
        matrices = (other.left, other.right) if isinstance(other, LowRank) else (other,)
        for matrix in matrices:
            if matrix.ndim != 2 or not matrix.is_floating_point():
                got = f"got shape {tuple(matrix.shape)} of {matrix.dtype}"
                raise ValueError(f"{what}: expected a floating-point matrix, {got}")
        if other.shape != weight.shape:
            shapes = (
                f"shape {tuple(other.shape)} differs from the pretrained model's "
                f"{tuple(weight.shape)}"
            )
            raise ValueError(f"{what}: {shapes}")
        if not all(map(is_finite, matrices)):
            raise ValueError(f"{what}: the weight has NaN or infinite values")
    if extra := layers.keys() - reference.keys():
        raise ValueError(
            f"model '{model}' has layers that the pretrained model lacks: {sorted(extra)}"
        )


def _stack(weights: Sequence[Any], where: torch.device, dtype: torch.dtype) -> Any:
    """Return weights, or factors, of one shape as one tensor on a device, or one pair of them."""
    if isinstance(weights[0], LowRank):
        sides = ([getattr(task, side) for task in weights] for side in ("left", "right"))
        return LowRank(*(_stack(side, where, dtype) for side in sides))
    # Values are widened where they arrive, which is half the traffic; and the bits are the same in
    # any layout.
    wide = [weight.detach().to(where).to(dtype).contiguous() for weight in weights]
    return (
        torch.stack(wide) if len(wide) > 1 else wide[0][None]
    )  # a view: no copy of a single layer


def _check_adapters(layers: Layers, lora_A: Layers, config: FusionConfig) -> None:
    for name, weight in layers.items():
        expected = (config.ranks(weight.shape[1]).lora, weight.shape[1])
        got = tuple(lora_A[name].shape) if name in lora_A else None
        if got != expected:
            raise ValueError(f"lora_A of layer '{name}': expected shape {expected}, got {got}")


def _initial_A(name: str, d_i: int, config: FusionConfig, seed: int, step: int) -> Tensor:
    """Draw A ~ N(0, init_std^2), ``(lora_rank, d_i)``: the same on every device, alone or among
    other layers.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    cpu = torch.device("cpu")  # and float32, whatever torch's defaults are
    generator = torch.Generator(cpu).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    A = torch.randn(
        config.ranks(d_i).lora, d_i, generator=generator, dtype=torch.float32, device=cpu
    )
    return A * config.init_std
