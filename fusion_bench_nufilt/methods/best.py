r"""`best`: the mean of TSV-M and spectral voting, with no more of each than it needs.

Each member does what it is good at. TSV-M merges the few directions that matter most to a task,
spectral voting what many directions have in common, so that

- TSV-M keeps k // max(T, 8) directions of each of T tasks, where k is ``min(d_o, d_i)``, without
  those below a fiftieth of the strongest; randomized subspace iteration finds them;
- votes below a ten-thousandth of the strongest are left out, which are those of directions below a
  twentieth of a task's largest singular value. Above that, single precision will do for a vote, and
  few directions for the sum of a few tasks, unless these are flat.

The strength follows from the tasks. Neither member's update is shorter than :math:`\sqrt{\sum_t
\lVert \tau_t \rVert^2}`, the length of the sum of tasks that have nothing in common, as it would be
where task vectors are flat, such as Muon's; and a task of low rank, such as a LoRA adapter, has
half of the strength. docs/notes/best.md has the reasons.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import State
from .order_free import FirstWhole, OrderFree, ScaleConfig
from .spectral import Spectral, SpectralConfig
from .task_vector import EIGHT, Directions, TaskVector
from .tsv import TsvStream


class _Leading(TsvStream):
    def share(self, k: int, tasks: int) -> int:
        return min(k // max(1, tasks), max(1, k // EIGHT))

    def directions_of(self, task: TaskVector, k: int, tasks: int) -> Directions:
        U, s, V = (each[..., : self.share(k, tasks)] for each in task.leading)
        kept = s > s[:1] / 50
        return Directions(U * kept, s * kept, V * kept)


class _Votes(Spectral):
    faintest = 1e-4

    def vote(self, task: TaskVector) -> tuple[Tensor, Tensor]:
        return task.rough_vote(self.faintest)


class Best(FirstWhole):
    """The mean of the updates of TSV-M at scale 1.5 and of spectral voting with damp 1, whose
    states are both kept.

    The strength of a layer is the mean of its tasks', of which one with fewer directions than an
    eighth of the layer's has half.
    """

    name = "best"
    label = "TSV-M with spectral voting"
    citation = f"the mean of the updates by {TsvStream.citation} and by {Spectral.citation}"
    defaults = {**OrderFree.defaults, "ramp": 0.4}  # noqa: RUF012
    directions = TsvStream.directions

    def __init__(self, options: ScaleConfig, layers: Sequence[str], seed: int = 42) -> None:
        super().__init__(options, layers, seed)
        self.members = (
            _Leading(ScaleConfig(scale=1.5), layers),
            _Votes(SpectralConfig(damp=1.0), layers),
        )

    def sums(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        tsv, votes = (member.sums(d_o, d_i) for member in self.members)
        return {"low_rank": (), "energy": (), **tsv, **votes}

    def gather_next(self, state: State, task: TaskVector) -> State:
        tsv, votes = self.members
        state = votes.gather_next(tsv.gather(state, task), task)
        return {
            **state,
            "low_rank": state["low_rank"] + task.is_low_rank,
            "energy": state["energy"] + task.energy,
        }

    def update_of_several(self, state: State, scale: float) -> Tensor:
        tsv, votes = self.members
        least = state["energy"].sqrt().item()
        X_tsv = lengthened(tsv.update(state, tsv.scale), least)
        X_votes = lengthened(votes.update_of_several(state, votes.scale), least)
        return (
            scale
            * (1 - state["low_rank"].item() / state["count"].item() / 2)
            * (X_tsv + X_votes)
            / 2
        )


def lengthened(X: Tensor, least: float) -> Tensor:
    """Return a matrix whose Frobenius norm is below ``least``, but not zero, at that length, and
    others as they are.
    """
    norm = torch.linalg.vector_norm(X).item()
    return X * (least / norm) if 0 < norm < least else X
