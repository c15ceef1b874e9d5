"""The rules for the tensors outside the merged layers: methods of a few lines, whose state is the
weight so far, in float32 at least where tasks join it.

They are functions of single values, so that a tensor may be given in blocks of any shape.
"""

from torch import Tensor, lerp

from fusion_bench_nufilt.methods.base import LayerMethod, Measures, State
from fusion_bench_nufilt.methods.task_vector import TaskVector
from fusion_bench_nufilt.utils.tensors import to_compute_dtype


class Keep(LayerMethod):
    """The weight so far, whatever the tasks have."""

    name = "pretrained"

    def init_state(self, base: Tensor) -> State:
        return {"weight": base}

    def update(
        self, state: State, base: Tensor, task: TaskVector, step: int
    ) -> tuple[State, Measures]:
        return state, {}


class First(Keep):
    """The first task's weight."""

    name = "first"

    def init_state(self, base: Tensor) -> State:
        return {"weight": to_compute_dtype(base)}

    def update(
        self, state: State, base: Tensor, task: TaskVector, step: int
    ) -> tuple[State, Measures]:
        if step > 1:
            return state, {}
        return {"weight": task.weights()}, {}


class RunningMean(First):
    r"""The mean of the tasks' weights, whose number is the step; without a task, the base's.

    One more of them makes it :math:`m + (\theta - m) / \text{step}`, in float32 at least. Whoever
    goes on from it must keep it so: rounded to bfloat16, the mean of many tensors no longer moves.
    """

    name = "mean"

    def update(
        self, state: State, base: Tensor, task: TaskVector, step: int
    ) -> tuple[State, Measures]:
        if step == 1:
            return {"weight": task.weights()}, {}
        mean = state["weight"]
        return {"weight": lerp(mean, task.weights().to(mean.dtype), 1 / step)}, {}


#: By the values of the option `other_params`.
RULES: dict[str, type[LayerMethod]] = {rule.name: rule for rule in (Keep, First, RunningMean)}
