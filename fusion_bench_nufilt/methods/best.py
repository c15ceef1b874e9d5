r"""`best`: the mean of TSV-M and spectral voting, and how strong it should be.

TSV-M merges the few directions that matter most to a task, spectral voting what many directions
have in common. Three of their options make both of them cheap: TSV-M keeps at most an eighth of a
layer's directions of each task, and none below a fiftieth of the task's strongest; votes below a
ten-thousandth of the strongest are left out.

The strength follows from the tasks:

- Neither member's update is shorter than :math:`\sqrt{\sum_t \lVert \tau_t \rVert^2}`, the length
  of the sum of tasks that have nothing in common, as it would be where task vectors are flat, such
  as Muon's. Where tasks cancel, this length fades with what is left of their votes, and both
  updates with it.
- A task of low rank, such as a LoRA adapter, has half of the strength in all of the model's layers
  (:mod:`.strength`), and a layer the mean of its tasks.

docs/notes/best.md has the reasons.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .base import State
from .options import DEFAULTS, ScaleConfig, SpectralConfig, TsvConfig
from .order_free import FirstWhole
from .spectral import Spectral
from .task_vector import TaskVector
from .tsv import TsvStream


class Best(FirstWhole):
    """The mean of the updates of TSV-M and of spectral voting, whose states are both kept.

    The state also has the sum of the tasks' ``strength``, and that of their ``energy``, the squared
    norms of the layer's task vectors.
    """

    name = "best"
    label = "TSV-M with spectral voting"
    citation = f"the mean of the updates by {TsvStream.citation} and by {Spectral.citation}"
    defaults = DEFAULTS[name]
    directions = TsvStream.directions
    weighs_tasks = True

    def __init__(
        self,
        options: ScaleConfig,
        layers: Sequence[str],
        seed: int = 42,
        last_blocks: Mapping[str | None, int] | None = None,
    ) -> None:
        super().__init__(options, layers, seed, last_blocks)
        # Without a ramp: the strength of best has one, which multiplies both updates.
        self.tsv = TsvStream(TsvConfig(scale=1.5, keep=1 / 8, faintest=1 / 50), layers)
        self.votes = Spectral(SpectralConfig(damp=1.0, faintest=1e-4), layers)

    def state_shapes(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        members = {**self.tsv.state_shapes(d_o, d_i), **self.votes.state_shapes(d_o, d_i)}
        return {"strength": (), "energy": (), **members}

    def accumulate(self, state: State, task: TaskVector) -> State:
        # Here, since accumulate_next gets the first task late, and without its strength.
        return super().accumulate({**state, "strength": state["strength"] + task.strength}, task)

    def accumulate_next(self, state: State, task: TaskVector) -> State:
        state = self.votes.accumulate_next(self.tsv.accumulate(state, task), task)
        return {**state, "energy": state["energy"] + task.energy}

    def merged_update_of_several(self, state: State, scale: float) -> Tensor:
        left_over = self.votes.left_over(state)
        least = left_over * state["energy"].sqrt().item()
        # The update by votes fades with them by itself; TSV-M does not know that tasks cancel.
        X_tsv = left_over * self.tsv.merged_update(state, self.tsv.scale)
        X_tsv = rescale_to_min_norm(X_tsv, least)
        X_votes = self.votes.merged_update_of_several(state, self.votes.scale)
        X_votes = rescale_to_min_norm(X_votes, least)
        strength = state["strength"].item() / state["count"].item()
        return scale * strength * (X_tsv + X_votes) / 2


def rescale_to_min_norm(X: Tensor, least: float) -> Tensor:
    """Return a matrix whose Frobenius norm is below ``least``, but not zero, at that length, and
    others as they are.
    """
    norm = torch.linalg.vector_norm(X).item()
    return X * (least / norm) if 0 < norm < least else X
