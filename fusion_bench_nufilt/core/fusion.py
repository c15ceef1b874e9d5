"""One merging step over a dict of layers: filter, adapt, fuse."""

import functools
import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from .adapter import SOLVERS, Objective, loop_gram
from .checks import Layers, TaskLayers, check_adapters, check_layers
from .config import FusionConfig
from .devices import DevicePool, Devices, check_devices, fast_in_float64
from .dtypes import wide_dtype
from .low_rank import LowRank
from .projector import first_coordinates, null_space_filter, protected_subspace
from .subspace import subspace_affinity, top_right_singular_vectors
from .workers import map_layers, stack_size

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerReport:
    """What happened to one layer."""

    shape: tuple[int, ...]  # (d_o, d_i)
    seconds: float  # wall time, shared evenly by layers solved together
    solving_seconds: float  # of these, the solver's
    task_norm: float  # Frobenius norm of the new task vector
    merged_norm: float  # Frobenius norm of the cumulative update before this step
    protected_rank: float  # directions in the filter: r_p clipped to the numerical rank
    filtered_share: float  # share of the squared norm of tau that the filter took, in [0, 1]
    overlap: float  # affinity of the new task's subspace to the protected one, in [0, 1]
    loss_before: float  # objective where BA = 0
    loss_after: float  # objective of the fused adapter


def fuse_layers(
    pretrained: Layers,
    merged: Layers,
    task: TaskLayers,
    config: FusionConfig,
    *,
    seed: int = 0,
    step: int = 1,
    lora_A: Layers | None = None,
    progress: Callable[[str], object] | None = None,
    device: Devices | None = None,
    batch_bytes: int = 2**30,
) -> tuple[dict[str, Tensor], dict[str, LayerReport]]:
    r"""Merge one more task into every layer: :math:`W \leftarrow W + \tau (P + B A)`.

    Layers are independent, and each is computed in float32 at least, whatever it is stored in. A layer into
    which nothing was merged so far (:math:`W = W_0`) takes the task's weight as it is, or as
    ``config.first_task`` says.

    Args:
        pretrained: :math:`\theta_0`, weights ``(d_o, d_i)`` by layer name.
        merged: the merged model so far, same names and shapes; :math:`\theta_0` before the first task.
        task: the new fine-tuned model, same names and shapes; a layer of which only the factors of the update are
            given (:class:`LowRank`) is worked on in these, which is faster where they are thin.
        config: hyper-parameters.
        seed: seed of the run.
        step: number of the task in the stream. The initial A of a layer depends on seed, step and the layer's
            name, and on nothing else.
        lora_A: initial A ``(lora_rank, d_i)`` by layer name, instead of drawn ones.
        progress: called with the name of each finished layer.
        device: where to compute; default: where ``merged`` lies. Of several devices of a kind (a list, or a text with
            commas) each takes the next layers when it is free, and the result is the same.
        batch_bytes: on an accelerator, layers of equal shape are solved together within about this much memory;
            on a CPU each thread takes one layer at a time.

    Returns:
        The new weights, with names, order, dtypes and devices of ``merged``, and a report by layer. No
        argument is changed.

    Raises:
        ValueError: the three models do not fit or hold non-finite values (names the model, layer and shapes); a
            device that is neither cpu nor cuda, or has no room for a layer; devices of several kinds.
    """
    fused, reports = {}, {}
    each = fuse_each(
        pretrained, merged, task, config, seed=seed, step=step, lora_A=lora_A, device=device, batch_bytes=batch_bytes
    )
    for name, weight, report in each:
        fused[name], reports[name] = weight, report
        if progress is not None:
            progress(name)
    return {name: fused[name] for name in merged}, {name: reports[name] for name in merged}


def fuse_each(
    pretrained: Layers,
    merged: Layers,
    task: TaskLayers,
    config: FusionConfig,
    *,
    seed: int = 0,
    step: int = 1,
    lora_A: Layers | None = None,
    device: Devices | None = None,
    batch_bytes: int = 2**30,
) -> Iterator[tuple[str, Tensor, LayerReport]]:
    """:func:`fuse_layers` layer by layer, for who has no room for all results at once.

    Yields name, new weight and report of each layer as it is finished, layers of equal shape together. A layer of
    ``merged`` may be overwritten once it was yielded.
    """
    check_layers(pretrained, pretrained, model="pretrained")
    check_layers(pretrained, merged, model="merged")
    check_layers(pretrained, task, model="task")
    if lora_A is not None:
        check_adapters(merged, lora_A, config)
    fresh = {name for name in merged if not (merged[name] != pretrained[name]).any()}  # nothing was merged into them
    pool = DevicePool(devices := check_devices(device or next((w.device for w in merged.values()), "cpu")))

    @torch.no_grad()
    def compute(
        names: list[str], where: torch.device, exact_on: torch.device | None = None
    ) -> list[tuple[str, Tensor, LayerReport]]:
        start = time.perf_counter()

        def stack(weights: Iterable[Tensor]) -> Tensor:
            wide = [weight.detach().to(where, dtype).contiguous() for weight in weights]  # the same bits in any layout
            return torch.stack(wide) if len(wide) > 1 else wide[0][None]  # a view: no copy of a single layer

        def stack_task() -> Tensor | LowRank:
            tasks = [task[name] for name in names]
            if factors := [weight for weight in tasks if isinstance(weight, LowRank)]:
                return LowRank(stack(f.left for f in factors), stack(f.right for f in factors))
            return stack(weight for weight in tasks if isinstance(weight, Tensor))

        dtype, d_i = wide_dtype(merged[names[0]]), merged[names[0]].shape[1]
        A = None
        if config.lora_rank > 0:
            drawn = lora_A or {name: _initial_A(name, d_i, config, seed, step) for name in names}
            A = stack(drawn[name] for name in names)
        # Not named here, so that it can drop each of the three as soon as it is done with it.
        weights, measures = _fuse_stack(
            stack(pretrained[name] for name in names),
            stack(merged[name] for name in names),
            stack_task(),
            A,
            config,
            fresh=names[0] in fresh,
            exact_on=exact_on or (where if fast_in_float64(where) else None),
        )
        rows = measures.tolist()  # waits for an accelerator
        seconds = (time.perf_counter() - start) / len(names)
        results = []
        for name, weight, row in zip(names, weights, rows, strict=True):
            like = merged[name]
            results.append((name, weight.to(like.device, like.dtype), LayerReport(tuple(like.shape), seconds, *row)))
        return results

    # Neither refers to itself: a function that did would hold the models until the garbage collector comes by.
    def solve(names: list[str]) -> list[tuple[str, Tensor, LayerReport]]:
        with pool.free() as where:
            if len(names) > 1:
                with suppress(torch.linalg.LinAlgError, torch.cuda.OutOfMemoryError):
                    return compute(names, where)
            return [solve_alone(name, where) for name in names]  # the others are none the worse for one that fails

    def solve_alone(name: str, where: torch.device) -> tuple[str, Tensor, LayerReport]:
        for exact_on in (None, torch.device("cpu")):
            try:
                return compute([name], where, exact_on)[0]
            except (torch.linalg.LinAlgError, torch.cuda.OutOfMemoryError) as error:
                failure = error.with_traceback(None)  # which would hold the matrices
            if isinstance(failure, torch.cuda.OutOfMemoryError):
                raise ValueError(
                    f"layer '{name}' {tuple(merged[name].shape)}: no room on device '{where}'; choose device=cpu, or "
                    f"free memory there ({failure})"
                ) from failure
            _say_that_float64_takes_over(name, str(failure))
        raise ValueError(f"layer '{name}': no singular vectors, in float64 on the CPU either: {failure}") from failure

    stacks = list(_stacks(merged, task, fresh, devices[0], batch_bytes))
    for results in map_layers(solve, stacks, devices[0], len(devices) if len(devices) > 1 else None):
        yield from results


def _fuse_stack(
    theta_0: Tensor,
    theta: Tensor,
    task: Tensor | LowRank,
    A: Tensor | None,
    config: FusionConfig,
    *,
    fresh: bool,
    exact_on: torch.device | None,
) -> tuple[Tensor, Tensor]:
    """One step on n layers ``(n, d_o, d_i)``: new weights, and the numbers of LayerReport ``(n, 8)``.

    ``fresh``: nothing was merged into these layers so far. ``exact_on``: singular vectors in float64 on this device.

    At most five matrices of that shape are held at a time, and about three of d_i x d_i: a layer of a 7B model is
    180 MB, and threads that work side by side hold one each.
    """

    def norm2(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=(-2, -1)).square()

    # A low-rank tau is K in an orthonormal basis Q of the outputs it reaches: all below but the new weights is as if
    # the layer had these outputs only.
    Q, tau = task.in_basis() if isinstance(task, LowRank) else (None, task - theta_0)
    tau_norm2 = norm2(tau)
    if fresh and config.first_task == "paper":  # theta_merged(1) = theta_1
        theta_t = theta_0 + task.product() if isinstance(task, LowRank) else task
        zero = torch.zeros_like(tau_norm2)
        return theta_t, torch.stack([zero, tau_norm2.sqrt(), *[zero] * 6], dim=-1)
    tau_merged = theta - theta_0
    tau_merged_norm2 = norm2(tau_merged)
    del theta_0, task

    def all_outputs(x: Tensor) -> Tensor:
        return x if Q is None else Q @ x

    gram = loop_gram(tau)
    ranks = config.ranks(tau.shape[-1])
    V_t = top_right_singular_vectors(tau, ranks.task, gram, exact_on=exact_on)
    if fresh:
        V_p, A = first_coordinates(tau_merged, ranks.null), None
    else:
        V_p = protected_subspace(tau_merged, ranks.null, exact_on=exact_on)
    if config.null_space is False:
        tau_filtered = tau
    elif config.null_space == "zero":
        tau_filtered = torch.zeros_like(tau)
    else:
        tau_filtered = null_space_filter(tau, V_p)
    kept = norm2(tau_filtered) / tau_norm2.clamp_min(torch.finfo(tau.dtype).tiny)
    objective = Objective.build(tau, tau_filtered, tau_merged, V_t, V_p, gram, Q)
    del tau_merged

    weights = theta + all_outputs(tau_filtered)
    del theta, tau_filtered
    loss_before = loss_after = objective.target_norm2
    solving = 0.0
    if A is not None:
        begin = _clock(tau.device)
        A, B, losses = SOLVERS[config.solver](objective, A, config)
        solving = (_clock(tau.device) - begin) / len(tau)
        weights.baddbmm_(all_outputs(tau @ B), A)
        loss_after = losses[:, -1]

    measures = [
        torch.full_like(tau_norm2, solving),
        tau_norm2.sqrt(),
        tau_merged_norm2.sqrt(),
        norm2(V_p).round(),
        torch.where(tau_norm2 > 0, 1 - kept, 0).clamp_min(0),  # ||tau||^2 = ||tau P||^2 + ||tau (I - P)||^2
        subspace_affinity(V_t, V_p),
        loss_before,
        loss_after,
    ]
    return weights, torch.stack(measures, dim=-1)


def _stacks(
    layers: Layers, task: TaskLayers, fresh: set[str], where: torch.device, batch_bytes: int
) -> Iterator[list[str]]:
    """Names of layers to solve together: on a CPU one by one, else as many of a kind as the memory bound allows."""
    groups: dict[tuple[torch.Size, torch.dtype, int | None, bool], list[str]] = defaultdict(list)
    for name, weight in layers.items():
        rank = new.rank if isinstance(new := task[name], LowRank) else None
        groups[weight.shape, wide_dtype(weight), rank, name in fresh].append(name)
    for (shape, dtype, *_), names in groups.items():
        size = stack_size(shape, dtype.itemsize, where, batch_bytes)
        yield from (names[i : i + size] for i in range(0, len(names), size))


def _clock(where: torch.device) -> float:
    """Seconds; an accelerator has done by then what it was given to do."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return time.perf_counter()


@functools.cache
def _say_that_float64_takes_over(layer: str, reason: str) -> None:
    log.warning("layer '%s': %s; float64 on the CPU takes over, which is slower", layer, reason)


def _initial_A(name: str, d_i: int, config: FusionConfig, seed: int, step: int) -> Tensor:
    """A ~ N(0, init_std^2), ``(lora_rank, d_i)``: the same on every device, alone or among other layers."""
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    cpu = torch.device("cpu")  # and float32, whatever the defaults are
    generator = torch.Generator(cpu).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    A = torch.randn(config.ranks(d_i).lora, d_i, generator=generator, dtype=torch.float32, device=cpu)
    return A * config.init_std
