"""The plain computation of a merging step, word for word from the paper, and the operations that it
needs at least.
"""

import torch
from torch import Tensor

from fusion_bench_nufilt.nufilt import FusionConfig


def plain_step(
    theta_0: Tensor, theta: Tensor, theta_t: Tensor, config: FusionConfig, lora_A: Tensor
) -> Tensor:
    r"""Merge one task into one layer: full SVD, P formed, the loss as printed, autograd, Adam.

    Nothing is rearranged; only what no update changes is kept out of the loop.

    Args:
        theta_0: pretrained weight, ``(d_o, d_i)``.
        theta: merged weight so far; ``theta_0`` before the first task.
        theta_t: the new task's weight.
        config: hyper-parameters.
        lora_A: initial A, ``(r_l, d_i)``.

    Returns:
        The new merged weight :math:`W + \tau (P + B A)`, ``(d_o, d_i)``.
    """
    tau = theta_t - theta_0
    tau_merged = theta - theta_0
    ranks = config.ranks(tau.shape[1])
    V_p = torch.linalg.svd(tau_merged, full_matrices=False).Vh[: ranks.null].T
    V_t = torch.linalg.svd(tau, full_matrices=False).Vh[: ranks.task].T
    P = torch.eye(tau.shape[1], dtype=tau.dtype, device=tau.device)
    if config.null_space == "zero":
        P = torch.zeros_like(P)
    elif config.null_space:
        P = P - V_p @ V_p.T
    tau_P = tau @ P
    if not tau_merged.any():  # the first task
        if config.first_task == "paper":
            return theta_t.clone()
        return theta + tau_P

    A = lora_A[: ranks.lora].clone().requires_grad_()
    B = torch.zeros(
        tau.shape[1], ranks.lora, dtype=tau.dtype, device=tau.device, requires_grad=True
    )
    T = torch.cat([tau @ V_t, tau_merged @ V_p], dim=1)
    V = torch.cat([V_t, V_p], dim=1)
    adam = torch.optim.Adam([A, B], lr=config.lr)
    for _ in range(config.max_steps):
        M = tau_merged + tau_P + tau @ B @ A
        loss = (T - M @ V).square().sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return theta + tau_P + (tau @ B @ A).detach()


def needed_flops(d_o: int, d_i: int, config: FusionConfig) -> int:
    """Return the floating-point operations of the matrix products that a step needs at least, for
    one layer.

    Not counted: eigenvectors of the Gram matrices, Adam, sums.
    """
    small = min(d_o, d_i)
    steps = config.max_steps
    ranks = config.ranks(d_i)
    r_p = min(ranks.null, small)
    r_l = ranks.lora
    r_v = min(ranks.task, small)
    # One triangle of G = tau^T tau, for V_t too; G B.
    with_gram = d_o * d_i**2 + steps * 2 * d_i**2 * r_l
    # The smaller Gram matrix for V_t; tau^T (tau B).
    without_gram = d_o * d_i * small + steps * 4 * d_o * d_i * r_l
    flops = min(with_gram, without_gram)
    flops += d_o * d_i * small  # one triangle of the smaller Gram matrix of tau_merged, for V_p
    if d_o < d_i:
        flops += 2 * d_o * d_i * (r_p + r_v)  # from left singular vectors to right ones
    flops += 4 * d_o * d_i * r_p  # (tau V_p) V_p^T
    flops += 4 * d_o * d_i * r_v  # T = -tau_merged V_t + ..., H = tau^T T
    flops += steps * 4 * r_l * d_i * (r_p + r_v)  # Y = A V and the gradient's E V^T
    flops += steps * 4 * d_i * r_l * (r_l + r_v)  # B^T (G B), (G B)(Y Y^T), B^T H, H Y^T
    flops += 4 * d_o * d_i * r_l  # (tau B) A
    return flops
