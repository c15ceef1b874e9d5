"""
TSV-M (Gargiulo et al., CVPR 2025, https://arxiv.org/abs/2412.00081) with a state of the
size of two models: each of T tasks keeps its min(d_o, d_i) // T leading directions, which
are cut as T grows, and both sides are then made orthogonal.
"""

from typing import Dict, Tuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusion_bench import auto_register_config

from .base import OrderFreeMerging, State, map_spectrum


@auto_register_config
class TSVStreamMerging(OrderFreeMerging):
    def __init__(self, scale: float = 1.0, **kwargs):
        """
        Args:
            scale (float): strength of the update.
        """
        super().__init__(**kwargs)

    def shapes(self, d_o: int, d_i: int) -> Dict[str, Tuple[int, ...]]:
        k = min(d_o, d_i)
        return {"left": (d_o, k), "values": (k,), "right": (d_i, k)}

    def add(self, state: State, tau: Tensor, count: int) -> State:
        """Columns beyond T (k // T) are zero."""
        k, kept = min(tau.shape), {}
        share, before = k // count, k // max(1, count - 1)
        new = dict(zip(("left", "values", "right"), leading_directions(tau, share)))
        for key, value in state.items():
            starts = range(0, (count - 1) * before, max(1, before))
            earlier = [value[..., start : start + share] for start in starts]
            columns = torch.cat([*earlier, new[key]], dim=-1)
            kept[key] = pad(columns, (0, k - count * share))
        return kept

    def update(self, state: State, count: int) -> Tensor:
        left = map_spectrum(state["left"], torch.ones_like)  # the polar factor
        right = map_spectrum(state["right"], torch.ones_like)
        return self.scale * left * state["values"] @ right.T


def leading_directions(tau: Tensor, count: int) -> Tuple[Tensor, Tensor, Tensor]:
    """
    Return the leading singular values between left (d_o, count) and right vectors. Those
    that are rounding in float32 (numpy's rule) are zero.
    """
    if tau.shape[0] < tau.shape[1]:
        V, s, U = leading_directions(tau.T, count)
        return U, s, V
    V = torch.linalg.eigh(tau.T @ tau).eigenvectors.flip(-1)[:, :count]
    U = tau @ V
    s = torch.linalg.vector_norm(U, dim=0)
    exist = s > max(tau.shape) * torch.finfo(torch.float32).eps * s[:1]
    return torch.where(exist, U / s, 0), s * exist, V * exist
