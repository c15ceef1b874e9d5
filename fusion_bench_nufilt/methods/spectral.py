"""Order-free methods on the singular directions of task vectors: spectral voting, TSV-M, and their
mean, `best`.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusion_bench_nufilt.nufilt.blocks import row_blocks
from fusion_bench_nufilt.nufilt.eigenvectors import gram_matrix

from .base import State, block_bytes
from .options import METHOD_TABLE, ScaleConfig, SpectralConfig
from .order_free import RTOL_OF_FLOAT32, OrderFree, map_spectrum
from .task_vector import RTOL, Directions, TaskVector, least_vote


class FirstWhole(OrderFree):
    """A method that takes a single task whole, as the state's ``votes``, and sees to it once a
    second one arrives.
    """

    @abstractmethod
    def accumulate_next(self, state: State, task: TaskVector) -> State:
        """Return the sums with one more task, as :meth:`accumulate` does, of which the state has
        all earlier ones.
        """

    @abstractmethod
    def merged_update_of_several(
        self, state: State, scale: float, shape: tuple[int, int]
    ) -> Tensor:
        """Return the merged update ``(d_o, d_i)`` of at least two tasks."""

    def accumulate(self, state: State, task: TaskVector) -> State:
        count = state["count"]
        if count == 1:
            return {**state, "votes": task.matrix}
        if count == 2:
            first = task.before(state["votes"])
            votes = torch.zeros_like(state["votes"])
            state = self.accumulate_next({**state, "votes": votes, "count": count - 1}, first)
        return self.accumulate_next({**state, "count": count}, task)

    def merged_update(self, state: State, scale: float, shape: tuple[int, int]) -> Tensor:
        if state["count"] == 1:
            return state["votes"]
        return self.merged_update_of_several(state, scale, shape)


class Spectral(FirstWhole):
    r"""Spectral voting: the directions that tasks change most, at nearly equal strength. It is not
    from the paper.

    The tasks of a layer vote, and the merged update is the sum of their votes with its spectrum
    made nearly flat:

    .. math::
        A_t = U (s / s_1)^3 V^\top = \tau_t \tau_t^\top \tau_t / s_1^3 \quad (\tau_t = U s V^\top),
        \qquad S = \sum_t A_t = U_S\, \sigma\, V_S^\top, \qquad X = \kappa\, m\; U_S\, q(\sigma)\,
        V_S^\top

    with m the mean of the tasks' :math:`s_1`. Because of the cube, a task votes with its leading
    directions only. A sum does not depend on the order in which the tasks arrive, so neither does
    X. q lifts votes of :math:`10^{-6}` to full strength, so that S is decomposed in float64.

    It would lift as much what little is left of votes that cancel. So where the sum of the votes is
    less than half as long as that of unrelated ones, :math:`\lVert S \rVert < \tfrac12 \sqrt{\sum_t
    \lVert A_t \rVert^2}`, X is multiplied by the ratio of the two lengths.

    The state of a layer is the sum of the ``votes`` ``(d_o, d_i)`` of its tasks, that of their
    squared norms, the ``vote_energy``, and the ``mean`` of the tasks' largest singular values.
    """

    name = "spectral"
    label = "spectral voting"
    citation = "spectral voting, an unpublished method of fusion-bench-nufilt"
    Options = METHOD_TABLE[name].Options

    scale_option = "kappa"
    options: SpectralConfig
    faintest = RTOL
    """Votes below this share of the strongest are left out; from 1e-4 on, votes are computed in
    float32."""

    state_axes: ClassVar[Mapping[str, str]] = {
        "votes": "oi",
        "vote_energy": "",
        "mean": "",
    }

    def accumulate_next(self, state: State, task: TaskVector) -> State:
        if self.faintest < RTOL_OF_FLOAT32:
            A, s_1 = task.vote()
        else:
            A, s_1 = task.rough_vote(self.faintest)
        vote_energy = state["vote_energy"] + A.to(torch.float64, copy=True).square_().sum()
        # In place, and last of all: where a solver fails, another begins with the state as it was.
        votes = state["votes"]
        total = A if A.dtype.itemsize > votes.dtype.itemsize else votes
        for rows in row_blocks(total):
            total[rows] = A[rows].double() + votes[rows]
        return {
            **state,
            "votes": total,
            "vote_energy": vote_energy,
            "mean": state["mean"] + (s_1 - state["mean"]) / state["count"],
        }

    def left_over(self, state: State) -> float:
        """Return 1, or the share that is left of votes that cancel: the length of their sum over
        half of that of unrelated ones.
        """
        length = torch.linalg.vector_norm(state["votes"], dtype=torch.float64).item()
        return min(1.0, 2 * length / state["vote_energy"].sqrt().item())

    def merged_update_of_several(
        self,
        state: State,
        scale: float,
        shape: tuple[int, int],
        directions: Tensor | None = None,
    ) -> Tensor:
        strength = scale * state["mean"].item() * self.left_over(state)
        return map_spectrum(
            state["votes"],
            lambda sigma: strength * flatten(sigma, self.options.damp),
            self.faintest,
            directions,
        )


SLOPE = 0.03  # the fall of q between no vote and one vote


def flatten(sigma: Tensor, damp: float) -> Tensor:
    """Return q, ``(k,)``: the strength of directions with ``sigma`` votes, which falls from 1 +
    SLOPE as they grow.
    """
    return torch.where(sigma <= 1, 1 + SLOPE * (1 - sigma), sigma.clamp_min(1) ** -damp)


class TsvStream(OrderFree):
    r"""TSV-M, task singular vectors (Gargiulo et al., CVPR 2025), of the tasks that have arrived.

    With ``k = min(d_o, d_i)``, each of T tasks keeps its k // T leading directions, and
    :math:`X = \lambda\, \mathrm{polar}([U_1 \dots U_T])\, \mathrm{diag}(s)\, \mathrm{polar}([V_1
    \dots V_T])^\top`. A new task shortens the lists of all earlier ones, so that the state,
    ``left`` ``(d_o, k)``, ``values`` ``(k,)`` and ``right`` ``(d_i, k)``, has at most the size of
    two models; its columns beyond T (k // T) are zero, and so are those that a task of lower rank
    lacks. Of more than k tasks, each has its strongest direction to offer, and the k strongest of
    these are kept. Directions are rounded to float16 once, as they arrive. ``columns`` is how
    many of them each task has.
    """

    name = "tsv_stream"
    label = "TSV-M (stream)"
    citation = (
        "TSV-M ([Gargiulo et al., CVPR 2025](https://arxiv.org/abs/2412.00081)), one task after "
        "another"
    )
    Options = METHOD_TABLE[name].Options
    direction_names = ("left", "right")

    options: ScaleConfig
    keep = 1.0
    """A task keeps at most this share of a layer's directions; below 1, they are found by two
    rounds of subspace iteration."""
    faintest = RTOL
    """Directions below this share of a task's strongest are left out."""

    state_axes: ClassVar[Mapping[str, str]] = {
        "left": "ok",
        "values": "k",
        "right": "ik",
        "columns": "",
    }

    def num_directions(self, k: int, tasks: int) -> int:
        """Return how many of k directions each of the tasks keeps."""
        return max(1, min(k // max(1, tasks), int(k * self.keep)))

    def directions_of(self, task: TaskVector, k: int, tasks: int) -> Directions:
        """Return those directions of a new task, the last of several, that it keeps."""
        count = self.num_directions(k, tasks)
        if self.keep < 1:
            # As many as a first task keeps, so that all methods share one iteration.
            U, s, V = task.leading(self.num_directions(k, 1))
            U = U[:, :count]
            s = s[:count]
            V = V[:, :count]
        else:
            U, s, V = task.directions(count)
        is_kept = s > self.faintest * s[:1]
        return Directions(U * is_kept, s * is_kept, V * is_kept)

    def accumulate(self, state: State, task: TaskVector) -> State:
        tasks = int(state["count"])
        k = len(state["values"])
        # In a basis, a task has no more directions than that.
        count = min(self.num_directions(k, tasks), len(state["left"]), len(state["right"]))
        count_before = max(1, int(state["columns"]))
        starts = range(0, min(k, (tasks - 1) * count_before), count_before)
        columns: dict[str, Tensor] = {}
        for name, all_new in self.directions_of(task, k, tasks)._asdict().items():
            new = all_new[..., :count]
            kept_columns = []
            for start in starts:
                earlier = state[name][..., start : start + min(count, count_before)]
                kept_columns.append(pad(earlier, (0, count - earlier.shape[-1])))
            kept_columns.append(new.to(state[name].dtype))
            columns[name] = torch.cat(kept_columns, dim=-1)
        if columns["values"].shape[-1] > k:
            # The strongest, in the order of their tasks; of equal ones the earlier.
            by_strength = columns["values"].argsort(descending=True, stable=True)
            strongest = by_strength[:k].sort().values
            columns = {name: value[..., strongest] for name, value in columns.items()}
        new_state = {**state, "columns": torch.full_like(state["columns"], count)}
        for name, value in columns.items():
            new_state[name] = pad(value, (0, k - value.shape[-1]))
        return new_state

    def working_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        numel = math.prod(shape)
        # The task vector, in its dtype twice; in float64 that, its product with the eigenvectors
        # of its Gram matrix and what QR makes of it; this matrix, its eigenvectors and the
        # solver's workspace; and, as measured, a seventh for what lies unused between the blocks
        # of one heap. Lists of directions are of half of the digits.
        directions = 2 * itemsize * numel + 8 * (4 * numel + 5 * min(shape) ** 2)
        return directions + block_bytes(shape, itemsize)

    def merged_update(self, state: State, scale: float, shape: tuple[int, int]) -> Tensor:
        s = state["values"]
        is_used = s > 0
        if not is_used.any():
            return s.new_zeros(len(state["left"]), len(state["right"]))
        # Orthogonalised, so that the directions of one task are no others'.
        left = polar_factor(state["left"][:, is_used].to(s.dtype))
        right = polar_factor(state["right"][:, is_used].to(s.dtype))
        return scale * left * s[is_used] @ right.mT


# Eigenvalues below this share of the largest, 8400 eps of float32, are inaccurate: in float32, they
# are wrong by up to 15 eps of the largest one.
RTOL_OF_EIGENVALUES = 1e-3
# What directions in float16 span besides themselves: three roundings of a whole one, at most. Those
# in float64 are told apart no further, so that no result depends on the dtype it is computed in.
SAME_DIRECTION = 3 * torch.finfo(torch.float16).eps


def polar_factor(X: Tensor) -> Tensor:
    r"""Return :math:`U V^\top` for :math:`X = U s V^\top`, ``(d, n)`` with n <= d, without the
    directions whose singular value is at most :data:`SAME_DIRECTION`, where columns have the length
    1.

    Tasks that share directions have fewer of them than columns, and the rest is rounding, or a
    difference no larger than that, which this would raise to full strength.

    A Gram matrix in float32 cannot tell faint directions from what rounding adds of strong ones.
    They are few, and a second step in float64 takes these parts out.
    """
    eigenvalues, V_all = torch.linalg.eigh(gram_matrix(X))  # the smallest first
    num_faint = int((eigenvalues < RTOL_OF_EIGENVALUES * eigenvalues[-1]).sum())
    V = V_all[:, num_faint:]
    U = X @ V
    s = torch.linalg.vector_norm(U, dim=0)
    U = U / s
    wide = X.double()
    V_faint = V_all[:, :num_faint].double()
    V_faint = V_faint - V.double() @ ((U / s).double().mT @ (wide @ V_faint))
    U_faint = wide @ V_faint
    del wide
    # V_faint spans the faint directions; its rotation makes the outputs orthogonal, too.
    rotation = torch.linalg.eigh(U_faint.mT @ U_faint).eigenvectors
    U_faint = U_faint @ rotation
    V_faint = V_faint @ rotation
    s_faint = torch.linalg.vector_norm(U_faint, dim=0)
    U_faint = U_faint * torch.where(s_faint > SAME_DIRECTION, 1 / s_faint, 0)
    return U @ V.mT + (U_faint @ V_faint.mT).to(X)


class Best(FirstWhole):
    r"""The mean of the updates of TSV-M and of spectral voting, whose states are both kept.

    The state also has the sum of the tasks' ``strength``, and that of their ``energy``, the squared
    norms of the layer's task vectors.

    TSV-M merges the few directions that matter most to a task, spectral voting what many directions
    have in common. Three bounds make both of them cheap: TSV-M keeps at most an eighth of
    a layer's directions of each task, and none below a fiftieth of the task's strongest; votes
    below a ten-thousandth of the strongest are left out.

    The strength follows from the tasks:

    - Neither member's update is shorter than :math:`\sqrt{\sum_t \lVert \tau_t \rVert^2}`, the
      length of the sum of tasks that have nothing in common, as it would be where task vectors are
      flat, such as Muon's. Where tasks cancel, this length fades with what is left of their votes,
      and both updates with it.
    - A task of low rank, such as a LoRA adapter, has half of the strength in all of the model's
      layers (:mod:`fusion_bench_nufilt.merge.strength`), and a layer the mean of its tasks.

    docs/notes/best.md has the reasons.
    """

    name = "best"
    label = "TSV-M with spectral voting"
    citation = f"the mean of the updates by {TsvStream.citation} and by {Spectral.citation}"
    Options = METHOD_TABLE[name].Options
    defaults = METHOD_TABLE[name].defaults
    direction_names = TsvStream.direction_names
    weighs_tasks = True

    # Of any layer, and without a ramp: the strength of best has one, which multiplies both updates.
    tsv = TsvStream(ScaleConfig(scale=1.5), [])
    tsv.keep = 1 / 8
    tsv.faintest = 1 / 50
    votes = Spectral(SpectralConfig(damp=1.0), [])
    votes.faintest = 1e-4

    state_axes: ClassVar[Mapping[str, str]] = {
        "strength": "",
        "energy": "",
        **TsvStream.state_axes,
        **Spectral.state_axes,
    }

    def working_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        # In the dtype of the task vector, since no direction that counts is faint: the task
        # vector, the update of TSV-M, the sum of the votes, its products and what is made of them;
        # Gram matrices, eigenvectors and the solver's workspace, some in float64.
        numel = math.prod(shape)
        matrices = itemsize * (7 * numel + 5 * min(shape) ** 2)
        return matrices + block_bytes(shape, itemsize)

    def accumulate(self, state: State, task: TaskVector) -> State:
        # Here, since accumulate_next gets the first task late, and without its strength.
        return super().accumulate({**state, "strength": state["strength"] + task.strength}, task)

    def accumulate_next(self, state: State, task: TaskVector) -> State:
        state = self.votes.accumulate_next(self.tsv.accumulate(state, task), task)
        return {**state, "energy": state["energy"] + task.energy}

    def merged_update_of_several(
        self, state: State, scale: float, shape: tuple[int, int]
    ) -> Tensor:
        left_over = self.votes.left_over(state)
        least = left_over * state["energy"].sqrt().item()
        # The update by votes fades with them by itself; TSV-M does not know that tasks cancel.
        X = self.tsv.merged_update(state, self.tsv.scale, shape).mul_(left_over)
        rescale_to_min_norm(X, least)
        X_votes = self.votes.merged_update_of_several(
            state, self.votes.scale, shape, self.directions_of_votes(state)
        )
        rescale_to_min_norm(X_votes, least)
        strength = state["strength"].item() / state["count"].item()
        return X.add_(X_votes).mul_(scale * strength).div_(2)

    def directions_of_votes(self, state: State) -> Tensor | None:
        """Return the directions ``(min(d_o, d_i), n)`` of all votes that count, which TSV-M keeps;
        None where even the last that it keeps of a task counts, and others may.
        """
        tasks = int(state["count"])
        columns = int(state["columns"])
        values = state["values"][: tasks * columns]
        if len(values) < tasks * columns:  # of more tasks than directions, some have none
            return None
        strongest = values[::columns].repeat_interleave(columns)
        votes = values > least_vote(self.votes.faintest) * strongest
        if votes[columns - 1 :: columns].any():
            return None
        left, right = state["left"], state["right"]
        shorter = left if len(left) < len(right) else right
        return shorter[:, : tasks * columns][:, votes].to(state["votes"].dtype)


def rescale_to_min_norm(X: Tensor, least: float) -> None:
    """Lengthen a matrix whose Frobenius norm is below ``least``, but not zero, to that length, in
    place.
    """
    norm = torch.linalg.vector_norm(X).item()
    if 0 < norm < least:
        X.mul_(least / norm)
