"""The methods as their papers print them, in float64 and without a thought for cost: nothing here
is taken from the package but the draw of A.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

#: Singular values up to this share of the largest are zero, as those of a low-rank update are.
NUMERICAL_RANK = 1e-5


def right_singular_vectors(tau: Tensor, rank: int) -> Tensor:
    """Return V, (d_i, r): the top right singular vectors of a matrix (d_o, d_i)."""
    _, s, Vh = torch.linalg.svd(tau, full_matrices=False)
    exist = int((s > NUMERICAL_RANK * s.max()).sum()) if s.max() > 0 else 0
    return Vh[: min(rank, exist)].mT


def nufilt(
    theta_0: Tensor,
    tasks: Sequence[Tensor],
    *,
    null_rank: int,
    lora_rank: int,
    task_rank: int,
    max_steps: int,
    starts: Sequence[Tensor],
    lr: float = 1e-3,
    null_space: bool | str = True,
    first_task: str = "paper",
) -> Tensor:
    """Return the merged weight (d_o, d_i) of tasks that arrive one by one.

    ``starts`` has the initial A (r_l, d_i) of each task.
    """
    d_o, d_i = theta_0.shape
    eye = torch.eye(d_i, dtype=theta_0.dtype)
    merged = theta_0
    for number, theta_t in enumerate(tasks):
        tau_t = theta_t - theta_0
        tau_so_far = merged - theta_0
        # Of the layer, which earlier tasks may have left alone.
        is_first = not tau_so_far.any()
        if is_first and first_task == "paper":
            merged = theta_t
            continue
        if is_first:  # the released run's "singular vectors" of zeros
            V_p = eye[:, : min(null_rank, d_o, d_i)]
        else:
            V_p = right_singular_vectors(tau_so_far, null_rank)
        V_t = right_singular_vectors(tau_t, task_rank)
        P = eye - V_p @ V_p.mT
        if null_space is False:
            P = eye
        elif null_space == "zero":
            P = torch.zeros_like(eye)
        change = torch.zeros_like(eye)
        if lora_rank > 0 and task_rank > 0 and not is_first:
            change = adapter(tau_t, tau_so_far, P, V_t, V_p, starts[number], lr, max_steps)
        merged = merged + tau_t @ (P + change)
    return merged


def adapter(
    tau_t: Tensor,
    tau_so_far: Tensor,
    P: Tensor,
    V_t: Tensor,
    V_p: Tensor,
    start: Tensor,
    lr: float,
    max_steps: int,
) -> Tensor:
    """Return BA (d_i, d_i), by autograd and the loss as it is printed."""
    A = start.to(tau_t.dtype).clone().requires_grad_()
    B = torch.zeros(start.shape[1], start.shape[0], dtype=tau_t.dtype, requires_grad=True)
    adam = torch.optim.Adam([A, B], lr=lr)
    for _ in range(max_steps):
        update = tau_so_far + tau_t @ P + tau_t @ B @ A
        plasticity = ((tau_t - update) @ V_t).square().sum()
        stability = ((tau_so_far - update) @ V_p).square().sum()
        adam.zero_grad()
        (plasticity + stability).backward()
        adam.step()
    return (B @ A).detach()
