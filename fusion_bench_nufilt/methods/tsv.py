r"""TSV-M from the tasks' leading directions, one task after another."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .base import State
from .options import TsvConfig
from .order_free import OrderFree, polar_factor
from .task_vector import Directions, TaskVector


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
    Options = TsvConfig
    directions = ("left", "right")

    options: TsvConfig

    def state_shapes(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        k = min(d_o, d_i)
        return {"left": (d_o, k), "values": (k,), "right": (d_i, k), "columns": ()}

    def num_directions(self, k: int, tasks: int) -> int:
        """Return how many of k directions each of the tasks keeps."""
        return max(1, min(k // max(1, tasks), int(k * self.options.keep)))

    def directions_of(self, task: TaskVector, k: int, tasks: int) -> Directions:
        """Return those directions of a new task, the last of several, that it keeps."""
        count = self.num_directions(k, tasks)
        if self.options.keep < 1:
            # As many as a first task keeps, so that all methods share one iteration.
            U, s, V = task.leading(self.num_directions(k, 1))
            U = U[:, :count]
            s = s[:count]
            V = V[:, :count]
        else:
            U, s, V = task.directions(count)
        is_kept = s > self.options.faintest * s[:1]
        return Directions(U * is_kept, s * is_kept, V * is_kept)

    def accumulate(self, state: State, task: TaskVector) -> State:
        tasks = int(state["count"])
        k = len(state["values"])
        count = self.num_directions(k, tasks)
        # Not what the options say now: an earlier merge may have had another ``keep``.
        count_before = max(1, int(state["columns"]))
        starts = range(0, min(k, (tasks - 1) * count_before), count_before)
        columns: dict[str, Tensor] = {}
        for name, new in self.directions_of(task, k, tasks)._asdict().items():
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
            columns = {name: each[..., strongest] for name, each in columns.items()}
        kept = {**state, "columns": torch.full_like(state["columns"], count)}
        for name, each in columns.items():
            kept[name] = pad(each, (0, k - each.shape[-1]))
        return kept

    def merged_update(self, state: State, scale: float) -> Tensor:
        s = state["values"]
        is_used = s > 0
        if not is_used.any():
            return s.new_zeros(len(state["left"]), len(state["right"]))
        # Orthogonalised, so that the directions of one task are no others'.
        left = polar_factor(state["left"][:, is_used].to(s.dtype))
        right = polar_factor(state["right"][:, is_used].to(s.dtype))
        return scale * left * s[is_used] @ right.mT
