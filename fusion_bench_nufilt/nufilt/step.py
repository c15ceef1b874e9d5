"""The mathematics of one merging step on a stack of layers of equal shape: filter,
adapt, fuse.
"""

import hashlib
import time
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .adapter import Objective, Solver, loop_gram
from .blocks import row_blocks
from .config import StepConfig
from .noise import expected_noise
from .subspace import (
    first_coordinates,
    null_space_filter,
    subspace_affinity,
    top_right_singular_vectors,
)


@dataclass(frozen=True)
class LayerReport:
    """What one step did to one layer."""

    shape: tuple[int, ...]  # (d_o, d_i)
    seconds: float  # wall time, shared evenly by layers that were solved together
    solving_seconds: float = 0.0  # the part of it that the solver took
    task_norm: float = 0.0  # Frobenius norm of the new task vector
    merged_norm: float = 0.0  # Frobenius norm of the cumulative update before this step
    #: number of directions in the filter: r_p clipped to the numerical rank, which in
    #: 16 bits is the number of those that are stronger than rounding
    protected_rank: float = 0.0
    #: share of the squared norm of tau that the filter took, in [0, 1]
    filtered_share: float = 0.0
    #: affinity of the new task's subspace to the protected one, in [0, 1]
    overlap: float = 0.0
    loss_before: float = 0.0  # objective where BA = 0
    loss_after: float = 0.0  # objective of the fused adapter


#: The names of what a step measures of a layer.
MEASURES = tuple(
    each.name for each in fields(LayerReport) if each.name not in ("shape", "seconds")
)


def fuse_stack(
    theta_0: Tensor,  # (n, d_o, d_i), as they are stored
    theta: Tensor,  # (n, d_o, d_i), as they are stored
    tau: Tensor,  # task vectors (n, d_o, d_i) in float32 at least, or K of tau = Q K
    A: Tensor | None,  # (n, r_l, d_i); None means no adapter
    config: StepConfig,
    solve: Solver,
    *,
    is_first_task: bool,
    float64: bool,
    Q: Tensor | None = None,
    height: int | None = None,
    rounding: float = 0.0,
    rounding_before: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    r"""Merge one more task into n layers: :math:`W \leftarrow W + \tau (P + B A)`.

    ``solve`` finds the adapters. ``is_first_task`` says that nothing has been merged
    into the layers so far; a first task that is taken whole needs no step, see
    :func:`measures_of_first`. With ``float64``, matrices are decomposed in float64.
    ``height`` is the number of the layers' outputs, where all is given in a basis of
    fewer.

    With an orthonormal basis Q of the outputs that the tasks reach, ``tau`` is K of
    :math:`\tau = Q K`, and all but the new weights is computed as if the layers had
    only these outputs.

    ``rounding`` is that of ``tau``, and ``rounding_before`` that of the cumulative
    update. Directions that are only :mod:`.noise` are no task's, and not protected.

    Returns:
        The new weights ``(n, d_o, d_i)``, and :data:`MEASURES` ``(n,)`` by name.
    """
    tau_norm2 = _norm2(tau)
    measures = dict.fromkeys(MEASURES, torch.zeros_like(tau_norm2))
    measures["task_norm"] = tau_norm2.sqrt()
    gram = loop_gram(tau)
    ranks = config.ranks(tau.shape[-1])
    noise = expected_noise(theta_0, tau, rounding)
    V_t = top_right_singular_vectors(
        tau, ranks.task, gram, float64=float64, height=height, noise=noise
    )
    # The cumulative update is not held while its singular vectors are found.
    if is_first_task:
        V_p = first_coordinates(tau, ranks.null, height)
        A = None
    else:
        noise_before = None
        if rounding_before:
            tau_merged = difference(theta, theta_0, tau.dtype)
            noise_before = expected_noise(theta_0, tau_merged, rounding_before)
            del tau_merged
        V_p = top_right_singular_vectors(
            difference(theta, theta_0, tau.dtype),
            ranks.null,
            float64=float64,
            height=height,
            noise=noise_before,
        )
    tau_merged = difference(theta, theta_0, tau.dtype)
    measures["merged_norm"] = _norm2(tau_merged).sqrt()
    tau_filtered = null_space_filter(tau, V_p, config.null_space)
    kept = _norm2(tau_filtered) / tau_norm2.clamp_min(torch.finfo(tau.dtype).tiny)
    # ||tau||^2 = ||tau P||^2 + ||tau (I - P)||^2
    measures["filtered_share"] = torch.where(tau_norm2 > 0, 1 - kept, 0).clamp_min(0)
    measures["protected_rank"] = _norm2(V_p).round()
    measures["overlap"] = subspace_affinity(V_t, V_p)
    objective = Objective.build(tau, tau_filtered, tau_merged, V_t, V_p, gram, Q)
    measures["loss_before"] = measures["loss_after"] = objective.target_norm2
    del tau_merged

    if Q is not None:
        tau_filtered = Q @ tau_filtered
    if tau_filtered is tau:
        weights = theta.to(tau.dtype).contiguous() + tau
    else:
        weights = tau_filtered.add_(theta.to(tau.dtype))
    del tau_filtered
    if A is not None:
        begin = clock(tau.device)
        A, B, losses = solve(objective, A.to(tau.dtype))
        seconds = (clock(tau.device) - begin) / len(tau)
        measures["solving_seconds"] = torch.full_like(tau_norm2, seconds)
        measures["loss_after"] = losses[:, -1]
        weights.baddbmm_(tau @ B if Q is None else Q @ (tau @ B), A)
    return weights, measures


def measures_of_first(tau: Tensor) -> dict[str, Tensor]:
    """Return :data:`MEASURES` of a first task that is taken whole."""
    task_norm = _norm2(tau).sqrt()
    return {
        **dict.fromkeys(MEASURES, torch.zeros_like(task_norm)),
        "task_norm": task_norm,
    }


def difference(weight: Tensor, base: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the difference of stored weights ``(..., d_o, d_i)`` in a dtype, with the
    same bits in any layout.
    """
    result = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for rows in row_blocks(result):
        result[..., rows, :] = weight[..., rows, :]
        result[..., rows, :] -= base[..., rows, :].to(dtype)
    return result


def clock(device: torch.device) -> float:
    """Return the time in seconds, once this thread's work on an accelerator is done.

    The work is that of the thread's CUDA stream; those of other threads go on.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def _norm2(X: Tensor) -> Tensor:
    """Return the squared Frobenius norms, ``(n,)``."""
    return torch.linalg.vector_norm(X, dim=(-2, -1)).square()


def initial_A(name: str, d_i: int, config: StepConfig, seed: int, step: int) -> Tensor:
    """Draw A ~ N(0, init_std^2), ``(lora_rank, d_i)``: the same on every device, alone
    or among other layers.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    cpu = torch.device("cpu")  # and float32, whatever torch's defaults are
    generator = torch.Generator(cpu).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    size = (config.ranks(d_i).lora, d_i)
    A = torch.randn(size, generator=generator, dtype=torch.float32, device=cpu)
    return A * config.init_std
