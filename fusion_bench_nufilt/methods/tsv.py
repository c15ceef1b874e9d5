"""TSV-M from the tasks' leading directions, one task after another."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .base import State
from .order_free import OrderFree, polar_factor
from .task_vector import Directions, TaskVector


class TsvStream(OrderFree):
    r"""TSV-M, task singular vectors (Gargiulo et al., CVPR 2025), of the tasks that have arrived.

    With ``k = min(d_o, d_i)``, each of T tasks keeps its k // T leading directions, and
    :math:`X = \lambda\, \mathrm{polar}([U_1 \dots U_T])\, \mathrm{diag}(s)\, \mathrm{polar}([V_1
    \dots V_T])^\top`. A new task shortens the lists of all earlier ones, so that the state,
    ``left`` ``(d_o, k)``, ``values`` ``(k,)`` and ``right`` ``(d_i, k)``, has at most the size of
    two models; its columns beyond T (k // T) are zero, and so are those that a task of lower rank
    lacks. Directions are rounded to float16 once, as they arrive.
    """

    name = "tsv_stream"
    label = "TSV-M (stream)"
    citation = (
        "TSV-M ([Gargiulo et al., CVPR 2025](https://arxiv.org/abs/2412.00081)), one task after "
        "another"
    )
    directions = ("left", "right")

    def sums(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        k = min(d_o, d_i)
        return {"left": (d_o, k), "values": (k,), "right": (d_i, k)}

    def share(self, k: int, tasks: int) -> int:
        """Return how many of k directions each of the tasks keeps."""
        return k // max(1, tasks)

    def directions_of(self, task: TaskVector, k: int, tasks: int) -> Directions:
        """Return those directions of a new task, the last of several, that it keeps."""
        return task.directions(self.share(k, tasks))

    def gather(self, state: State, task: TaskVector) -> State:
        tasks, k, kept = int(state["count"]), len(state["values"]), dict(state)
        share, share_before = self.share(k, tasks), self.share(k, tasks - 1)
        for name, new in self.directions_of(task, k, tasks)._asdict().items():
            starts = range(0, (tasks - 1) * share_before, max(1, share_before))
            earlier = [state[name][..., start : start + share] for start in starts]
            columns = torch.cat([*earlier, new.to(state[name].dtype)], dim=-1)
            kept[name] = pad(columns, (0, k - columns.shape[-1]))
        return kept

    def update(self, state: State, scale: float) -> Tensor:
        s = state["values"]
        if not s.any():
            return torch.zeros(
                len(state["left"]), len(state["right"]), dtype=s.dtype, device=s.device
            )
        left, right = (polar_factor(state[side][:, s > 0].to(s.dtype)) for side in self.directions)
        return scale * left * s[s > 0] @ right.mT
