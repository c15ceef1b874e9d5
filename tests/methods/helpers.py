"""A method on a single layer, whose state is given and returned without the stack around it."""

import dataclasses

from torch import Tensor

from fusion_bench_nufilt.merge.engine import do_jobs
from fusion_bench_nufilt.merge.fuse import machine_on
from fusion_bench_nufilt.methods.task_vector import TaskVector
from fusion_bench_nufilt.nufilt import LowRank
from fusion_bench_nufilt.nufilt.noise import rounding_of


def stacked(state):
    return {name: value[None] for name, value in state.items()}


def alone(state):
    return {name: value[0] for name, value in state.items()}


def start(method, theta_0):
    return alone(method.init_state(theta_0[None]))


def rounding_of_task(theta_t):
    """Return the rounding of a task vector, given by its weight or by factors, which have none."""
    if isinstance(theta_t, Tensor):
        return 2 * rounding_of(theta_t)
    return 0.0


def add(method, state, theta_0, theta_t, *, step=1, strength=1.0, rounding_before=None):
    """Return the state after one more task, which is given by its weight or by factors; by default,
    the tasks before have its rounding.
    """
    rounding = rounding_of_task(theta_t)
    if rounding_before is None:
        rounding_before = rounding
    if isinstance(theta_t, Tensor):
        given = theta_t[None]
    else:
        given = LowRank(theta_t.left[None], theta_t.right[None])
    task = TaskVector(
        given, theta_0[None], strength=strength, rounding=rounding, rounding_before=rounding_before
    )
    after, _ = method.update(stacked(state), theta_0[None], task, step)
    return alone(after)


def weight(method, state, theta_0):
    return method.merged_weight(stacked(state), theta_0[None])[0]


def all_of_layers(jobs):
    """What is merged by jobs of matrices: for each, its state and its weight."""
    merged = {}

    def pieces(layer, weigh):
        return [(layer.job.name, {**layer.state, "weight": weigh()})]

    jobs = [dataclasses.replace(job, pieces=pieces) for job in jobs]
    list(do_jobs(jobs, machine_on("cpu"), lambda _, pieces: merged.update(pieces)))
    return merged
