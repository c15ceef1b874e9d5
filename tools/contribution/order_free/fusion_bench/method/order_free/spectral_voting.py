"""
Spectral voting: what each task moves most, all of it at nearly the same strength.

    A_t = U (s / s_1)^3 V^T of tau_t = U s V^T,   S = sum_t A_t = U_S sigma V_S^T,
    X = kappa m U_S q(sigma) V_S^T

with m the mean of the tasks' s_1. Cubing lets a task vote with its leading directions.
"""

from typing import Dict, Tuple

import torch
from torch import Tensor

from fusion_bench import auto_register_config

from .base import FAINTEST, OrderFreeMerging, State, map_spectrum


@auto_register_config
class SpectralVotingMerging(OrderFreeMerging):
    def __init__(self, kappa: float = 0.9, damp: float = 0.5, **kwargs):
        """
        Args:
            kappa (float): strength of a direction, over the mean of the tasks' s_1.
            damp (float): directions that n tasks share are held down by n^-damp.
        """
        super().__init__(**kwargs)

    def shapes(self, d_o: int, d_i: int) -> Dict[str, Tuple[int, ...]]:
        return {"votes": (d_o, d_i), "mean": ()}

    def add(self, state: State, tau: Tensor, count: int) -> State:
        """A single task is taken whole: until the second one, the votes are its update."""
        A, s_1 = vote(tau)
        votes = vote(state["votes"])[0] if count == 2 else state["votes"]
        votes = tau if count == 1 else votes + A
        return {"votes": votes, "mean": state["mean"] + (s_1 - state["mean"]) / count}

    def update(self, state: State, count: int) -> Tensor:
        if count == 1:
            return state["votes"]
        strength = self.kappa * state["mean"].item()
        return map_spectrum(state["votes"], lambda sigma: strength * self.q(sigma))

    def q(self, sigma: Tensor) -> Tensor:
        """Return the strengths of directions with ``sigma`` votes."""
        shared = sigma.clamp_min(1) ** -self.damp
        q = torch.where(sigma <= 1, 1 + 0.03 * (1 - sigma), shared)
        return q.masked_fill(sigma < FAINTEST * sigma.amax(), 0)


def vote(tau: Tensor) -> Tuple[Tensor, Tensor]:
    """Return tau tau^T tau / s_1^3 and s_1."""
    if tau.shape[0] < tau.shape[1]:
        A, s_1 = vote(tau.T)
        return A.T, s_1
    gram = tau.T @ tau
    v_1 = torch.linalg.eigh(gram).eigenvectors[:, -1:]
    s_1 = torch.linalg.vector_norm(tau @ v_1)
    return tau @ (gram / s_1**3), s_1
