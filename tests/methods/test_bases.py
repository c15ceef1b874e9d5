"""A merge of factors in an orthonormal basis of theirs is the merge of their products."""

import pytest
import torch

from fusion_bench_nufilt.methods import METHODS, ORDER_FREE
from fusion_bench_nufilt.methods.options import VARIANTS
from fusion_bench_nufilt.nufilt import LowRank
from fusion_bench_nufilt.utils.options import split_options
from tests.methods.helpers import add, start, weight

SHAPES = [(60, 44), (44, 60)]
RANKS = (5, 3, 4)
TURNING = [
    name for name, method in METHODS.items() if method.sides_in_basis and name not in VARIANTS
]


def factors(shape, rank, seed):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(shape[0], rank, generator=generator, dtype=torch.float64)
    right = torch.randn(rank, shape[1], generator=generator, dtype=torch.float64)
    return LowRank(0.1 * left, 0.1 * right)


def merged(method, theta_0, tasks):
    state = start(method, theta_0)
    for step, task in enumerate(tasks, 1):
        state = add(method, state, theta_0, task, step=step)
    return weight(method, state, theta_0) - theta_0


def make(name, **arguments):
    kind = METHODS[name]
    defaults = dict(kind.defaults)
    if kind.name not in ORDER_FREE:
        defaults |= {"null_rank": 6, "lora_rank": 4, "task_rank": 3, "max_steps": 5}
    (options,), _ = split_options([kind.Options], defaults)
    return kind(options, ["layer"], **arguments)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TURNING)
def test_tasks_in_a_basis_of_their_directions_give_the_update_in_that_basis(name, shape):
    tasks = [factors(shape, rank, seed) for seed, rank in enumerate(RANKS)]
    theta_0 = torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    expected = merged(make(name), theta_0, tasks)
    Q = torch.linalg.qr(torch.cat([task.left for task in tasks], dim=1)).Q
    P = torch.eye(shape[1], dtype=torch.float64)
    if "i" in METHODS[name].sides_in_basis:
        P = torch.linalg.qr(torch.cat([task.right.mT for task in tasks], dim=1)).Q
    in_basis = [LowRank(Q.mT @ task.left, task.right @ P) for task in tasks]
    zeros = torch.zeros(Q.shape[1], P.shape[1], dtype=torch.float64)
    method = make(name, shapes={"layer": shape})
    update = Q @ merged(method, zeros, in_basis) @ P.mT
    # Squares of singular values are known to 1e-16 of the largest, and so the values to 1e-8.
    assert (update - expected).norm() < 1e-6 * expected.norm()


def test_what_the_axes_of_a_state_are_is_said_of_all_its_tensors():
    lengths = {"o": 7, "i": 5, "k": 5, "r": 2}
    for name in TURNING:
        method = make(name)
        state = start(method, torch.zeros(7, 5))
        assert state.keys() - method.state_axes.keys() <= {"count"}
        for key, axes in method.state_axes.items():
            assert state[key].shape == tuple(lengths[axis] for axis in axes)
