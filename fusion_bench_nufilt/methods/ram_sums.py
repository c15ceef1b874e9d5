"""RAM: the mean of each entry over the tasks that changed it."""

import torch
from torch import Tensor

from .base import State
from .order_free import OrderFree
from .task_vector import TaskVector

UNCHANGED = 1e-5  # the largest change of an entry that does not count


class RamSums(OrderFree):
    r"""RAM (Yuan et al., 2026): an entry of :math:`X / \lambda` is the mean over the tasks that
    changed it.

    A task changed an entry by more than 1e-5, or not at all. Task vectors of reinforcement learning
    in 16 bits have few such entries; where tasks changed all of them, as in float32, X is their
    mean. The default strength is for eight tasks of that kind; the paper's is 1. The state is the
    ``sum`` of the changes and how many tasks ``changed`` an entry, both ``(d_o, d_i)``.
    """

    name = "ram_sums"
    label = "RAM (running sums)"
    citation = "RAM ([Yuan et al., 2026](https://arxiv.org/abs/2601.13572)) from running sums"
    defaults = {**OrderFree.defaults, "scale": 4.0, "ramp": 0.4}  # noqa: RUF012

    def sums(self, d_o: int, d_i: int) -> dict[str, tuple[int, ...]]:
        return {"sum": (d_o, d_i), "changed": (d_o, d_i)}

    def gather(self, state: State, task: TaskVector) -> State:
        tau = task.matrix.double()
        changed = tau.abs() > UNCHANGED
        changes = torch.where(changed, tau, 0)
        return {
            **state,
            "sum": state["sum"].double() + changes,
            "changed": state["changed"].double() + changed,
        }

    def update(self, state: State, scale: float) -> Tensor:
        return scale * state["sum"].double() / state["changed"].double().clamp_min(1)
