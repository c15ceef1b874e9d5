"""NUFILT, null-space filtering, as a layer-wise method."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fusion_bench_nufilt.nufilt.blocks import row_blocks
from fusion_bench_nufilt.nufilt.low_rank import LowRank
from fusion_bench_nufilt.nufilt.options import FusionConfig
from fusion_bench_nufilt.nufilt.solvers import solver_of
from fusion_bench_nufilt.nufilt.step import (
    MEASURES,
    fuse_stack,
    initial_A,
    measures_of_first,
)
from fusion_bench_nufilt.utils.devices import fast_in_float64
from fusion_bench_nufilt.utils.tensors import (
    replace_rows,
    select_rows,
    stack,
    to_compute_dtype,
)

from .base import LayerMethod, Measures, State
from .options import METHOD_TABLE
from .task_vector import TaskVector


class Nufilt(LayerMethod):
    """Null-space filtering (Qiu et al., ICLR 2026), whose state is the merged weight itself."""

    name = "nufilt"
    label = "NUFILT"
    citation = "null-space filtering ([Qiu et al., ICLR 2026](https://arxiv.org/abs/2509.21413))"
    Options = METHOD_TABLE[name].Options
    solves_together = True
    sides_in_basis = "o"  # and not "i": A is drawn in the layer's own inputs
    state_axes: ClassVar[Mapping[str, str]] = {"weight": "oi"}
    logged = ("task_norm", "merged_norm", "filtered_share", "overlap", "loss_before", "loss_after")

    options: FusionConfig
    initial_adapters: Mapping[str, Tensor] | None = None
    """The initial A of each layer, instead of drawn ones."""

    def init_state(self, base: Tensor) -> State:
        # Rounded once, when it is written, and not after every task.
        return {"weight": to_compute_dtype(base)}

    def update(
        self, state: State, base: Tensor, task: TaskVector, step: int
    ) -> tuple[State, Measures]:
        theta = state["weight"]
        is_first_task = (~is_changed(theta, base)).tolist()
        if any(is_first_task) and not all(is_first_task):
            # Earlier tasks had only some of these layers.
            return self._update_parts(state, base, task, step, is_first_task)
        tau = task.matrix_or_factors
        rounding = task.rounding
        rounding_before = task.rounding_before
        Q: Tensor | None = None
        if isinstance(tau, LowRank):
            Q, tau = tau.in_basis()
        if is_first_task[0] and self.options.first_task == "paper":
            # A whole model's own bits, which the base plus a rounded difference need not have.
            weight = task.weights()
            return {"weight": weight.to(theta.dtype)}, measures_of_first(tau)
        del task  # as large as anything that follows
        A = None
        if self.options.has_adapter:
            A = self._initial_A(step, theta)
        float64 = fast_in_float64(theta.device)
        weight, measures = fuse_stack(
            base,
            theta,
            tau,
            A,
            self.options,
            solver_of(self.options, float64=float64),
            is_first_task=is_first_task[0],
            float64=float64,
            Q=Q,
            height=self.layer_shape(base)[0],
            rounding=rounding,
            rounding_before=rounding_before,
        )
        return {"weight": weight.to(theta.dtype)}, measures

    def _update_parts(
        self, state: State, base: Tensor, task: TaskVector, step: int, is_first_task: list[bool]
    ) -> tuple[State, Measures]:
        """Return what :meth:`update` does, of layers into which something has been merged, and of
        the others, by themselves.
        """
        weight = state["weight"]
        zeros = base.new_zeros(len(weight), dtype=torch.float64)
        measures = dict.fromkeys(MEASURES, zeros)
        for kind in (True, False):
            rows = [row for row, is_first in enumerate(is_first_task) if is_first == kind]
            part = self.for_stack([self.names[row] for row in rows])
            after, measures_of_part = part.update(
                {"weight": select_rows(state["weight"], rows)},
                select_rows(base, rows),
                task.rows(rows),
                step,
            )
            weight = replace_rows(weight, rows, after["weight"])
            for name, values in measures_of_part.items():
                measures[name] = replace_rows(measures[name], rows, values.double())
        return {"weight": weight}, measures

    def _initial_A(self, step: int, theta: Tensor) -> Tensor:
        """Return the initial A ``(n, r_l, d_i)`` of each layer."""
        d_i = theta.shape[-1]
        initial = []
        for name in self.names:
            if self.initial_adapters is None:
                A = initial_A(name, d_i, self.options, self.seed, step)
            else:
                A = self.initial_adapters[name].detach()
            initial.append(A.to(theta.device).contiguous())
        return stack(initial)

    def warning(self, shapes: Sequence[tuple[int, int]], *, all_merged: bool = False) -> str | None:
        rank = self.options.null_rank
        covered = sum(2 * min(self.options.ranks(d_i).null, d_i) > d_i for _, d_i in shapes)
        if self.options.null_space is not True or 2 * covered <= len(shapes):
            return None
        consequence = "Unless all linear layers are merged, little of a later task gets in; the"
        if all_merged:
            consequence = "The"
        return (
            f"null_rank={rank} covers more than half of the inputs of {covered} of {len(shapes)} "
            f"layers. {consequence} paper's ranks as shares of the width are null_rank=0.1667 "
            "lora_rank=0.0833"
        )

    def working_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        d_o, d_i = shape
        shorter, longer = sorted(shape)
        ranks = self.options.ranks(d_i)
        protected = min(ranks.null, shorter)
        block = min(shorter, 2 * protected + 16)
        # The Gram matrix of tau is held twice, once stacked.
        gram = 2 * d_i**2 if d_i <= 2 * d_o else 0
        # While singular vectors are computed, these are theta_0, theta, tau, and tau or
        # tau_merged in float64; then the Gram matrix of the latter with its eigenvectors
        # and the solver's workspace, or the eigenvectors and thin matrices, all in float64,
        # too. Afterwards there is tau P with its temporary.
        solver = max(
            8 * shorter**2,
            2 * shorter**2 + 3 * longer * (block + protected) + 8 * shorter * block,
        )
        subspaces = 5 * d_o * d_i + gram + solver
        # While the adapter is fitted, these are tau, the new weights, and thin matrices: A
        # and B with their gradients and what Adam keeps of them, and V and H.
        columns = protected + min(ranks.task, shorter)
        adapter = (
            2 * d_o * d_i
            + gram
            + d_i * (10 * ranks.lora + 4 * columns)
            + 4 * ranks.lora * (columns + ranks.lora)
        )
        return itemsize * max(subspaces, adapter)


def is_changed(weight: Tensor, base: Tensor) -> Tensor:
    """Tell which of n layers ``(n, d_o, d_i)`` have another weight than the base."""
    changed = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
    for rows in row_blocks(weight):
        differs = weight[:, rows] != base[:, rows]
        changed |= differs.flatten(start_dim=1).any(dim=1)
    return changed
