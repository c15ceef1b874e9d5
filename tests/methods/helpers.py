"""A method on a single layer, whose state is given and returned without the stack around it."""

import torch

from fusion_bench_nufilt.nufilt import LowRank
from fusion_bench_nufilt.utils.tensors import spacing_of


def stacked(state):
    return {name: value[None] for name, value in state.items()}


def alone(state):
    return {name: value[0] for name, value in state.items()}


def start(method, theta_0, layer="layer"):
    return alone(method.init_state([layer], theta_0[None]))


def add(method, state, theta_0, theta_t, *, step=1, strength=1.0, layer="layer"):
    """Return the state after one more task, which is given by its weight or by factors."""
    spacings = [torch.finfo(theta_0.dtype).eps] * step
    if isinstance(theta_t, LowRank):
        task = LowRank(theta_t.left[None], theta_t.right[None])
        spacings[-1] = 0.0
    else:
        task = theta_t[None]
        spacings[-1] = spacing_of(theta_t)
    after, _ = method.update(
        [layer],
        stacked(state),
        theta_0[None],
        task,
        step=step,
        strength=strength,
        spacings=spacings,
        coefficients=[1.0] * step,
        float64=False,
    )
    return alone(after)


def weight(method, state, theta_0, layer="layer"):
    return method.merged_weight([layer], stacked(state), theta_0[None], float64=False)[0]
