"""
The minimum of WUDI's loss (Cheng et al., 2025, https://arxiv.org/abs/2503.08099)

    sum_t ||(X - tau_t) tau_t^T||_F^2 / w_t,   w_t = ||tau_t||_F^2,

with a ridge, in closed form from running sums: X = scale R (M + eps mu I)^-1 with
M = sum_t tau_t^T tau_t / w_t, its mean eigenvalue mu, and R = sum_t tau_t tau_t^T tau_t / w_t.
"""

from typing import Dict, Tuple

import torch
from torch import Tensor

from fusion_bench import auto_register_config

from .base import OrderFreeMerging, State


@auto_register_config
class WUDISumsMerging(OrderFreeMerging):
    def __init__(self, scale: float = 1.0, eps: float = 0.1, **kwargs):
        """
        Args:
            scale (float): strength of the update.
            eps (float): ridge, over the mean eigenvalue of M.
        """
        super().__init__(**kwargs)

    def shapes(self, d_o: int, d_i: int) -> Dict[str, Tuple[int, ...]]:
        return {"M": (d_i, d_i), "R": (d_o, d_i)}

    def add(self, state: State, tau: Tensor, count: int) -> State:
        gram = tau.T @ (tau / tau.square().sum())
        return {"M": state["M"] + gram, "R": state["R"] + tau @ gram}

    def update(self, state: State, count: int) -> Tensor:
        M, R = state["M"], state["R"]
        identity = torch.eye(len(M), dtype=M.dtype, device=M.device)
        ridge = self.eps * M.diagonal().mean() * identity
        return (
            self.scale * torch.cholesky_solve(R.T, torch.linalg.cholesky(M + ridge)).T
        )
