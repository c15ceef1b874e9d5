r"""Spectral voting: the directions that tasks change most, at nearly equal strength. It is not from
the paper.

The tasks of a layer vote, and the merged update is the sum of their votes with its spectrum made
nearly flat:

.. math::
    A_t = U (s / s_1)^3 V^\top = \tau_t \tau_t^\top \tau_t / s_1^3 \quad (\tau_t = U s V^\top),
    \qquad S = \sum_t A_t = U_S\, \sigma\, V_S^\top, \qquad X = \kappa\, m\; U_S\, q(\sigma)\,
    V_S^\top

with m the mean of the tasks' :math:`s_1`. Because of the cube, a task votes with its leading
directions only. A sum does not depend on the order in which the tasks arrive, so neither does X. q
lifts votes of :math:`10^{-6}` to full strength, so that S is decomposed in float64.

It would lift as much what little is left of votes that cancel. So where the sum of the votes is
less than half as long as that of unrelated ones, :math:`\lVert S \rVert < \tfrac12 \sqrt{\sum_t
\lVert A_t \rVert^2}`, X is multiplied by the ratio of the two lengths.
"""

import torch
from torch import Tensor

from .base import State
from .options import SpectralConfig
from .order_free import RTOL_OF_FLOAT32, FirstWhole, map_spectrum
from .task_vector import TaskVector

SLOPE = 0.03  # the fall of q between no vote and one vote


class Spectral(FirstWhole):
    """Spectral voting.

    The state of a layer is the sum of the ``votes`` ``(d_o, d_i)`` of its tasks, that of their
    squared norms, the ``vote_energy``, and the ``mean`` of the tasks' largest singular values.
    """

    name = "spectral"
    label = "spectral voting"
    citation = "spectral voting, an unpublished method of fusion-bench-nufilt"
    Options = SpectralConfig

    strength = "kappa"
    options: SpectralConfig

    def state_shapes(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        return {"votes": (d_o, d_i), "vote_energy": (), "mean": ()}

    def accumulate_next(self, state: State, task: TaskVector) -> State:
        faintest = self.options.faintest
        if faintest < RTOL_OF_FLOAT32:
            A, s_1 = task.vote()
        else:
            A, s_1 = task.rough_vote(faintest)
        return {
            **state,
            "votes": state["votes"].double() + A,
            "vote_energy": state["vote_energy"] + A.square().sum(),
            "mean": state["mean"] + (s_1 - state["mean"]) / state["count"],
        }

    def left_over(self, state: State) -> float:
        """Return 1, or the share that is left of votes that cancel: the length of their sum over
        half of that of unrelated ones.
        """
        length = torch.linalg.vector_norm(state["votes"], dtype=torch.float64).item()
        return min(1.0, 2 * length / state["vote_energy"].sqrt().item())

    def merged_update_of_several(self, state: State, scale: float) -> Tensor:
        strength = scale * state["mean"].item() * self.left_over(state)
        return map_spectrum(
            state["votes"],
            lambda sigma: strength * flatten(sigma, self.options.damp),
            self.options.faintest,
        )


def flatten(sigma: Tensor, damp: float) -> Tensor:
    """Return q, ``(k,)``: the strength of directions with ``sigma`` votes, which falls from 1 +
    SLOPE as they grow.
    """
    return torch.where(sigma <= 1, 1 + SLOPE * (1 - sigma), sigma.clamp_min(1) ** -damp)
