"""FusionBench's own continual methods under the same protocol."""

import time
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

from fusion_bench import BaseModelPool
from torch import nn

from .evaluation import Evaluator, score
from .metrics import AccuracyMatrix
from .stream import Evaluate, task_order, tasks_to_score


def run_observed(
    algorithm: Any,
    modelpool: BaseModelPool,
    evaluator: Evaluator,
    *,
    evaluate: Evaluate = "diagonal",
    progress: Callable[[int], Any] = lambda step: None,
) -> tuple[AccuracyMatrix, float]:
    """Run a continual method of FusionBench as it is, and score its model after each step.

    Args:
        algorithm: a method of ``method/opcm`` or ``method/dop``: it has ``shuffle_order``, ``seed`` and
            ``save_on_every_step``, and hands each step's model to its ``save_merged_model``, where it is observed.
        modelpool: the stream.
        evaluator: scores the models; one evaluator serves many runs.
        evaluate: what to score, see :func:`tasks_to_score`.
        progress: called with each finished step (from 1).

    Returns:
        The scores and the seconds that the method took without them.
    """
    order = task_order(modelpool.model_names, shuffle=algorithm.shuffle_order, seed=algorithm.seed)
    matrix = AccuracyMatrix(order)
    seconds_scoring = 0.0

    def observe(model: nn.Module, index: int) -> None:
        nonlocal seconds_scoring
        begin = time.perf_counter()
        if tasks := tasks_to_score(order, index + 1, evaluate):
            report = evaluator.report(deepcopy(model), tasks)
            matrix.record(index + 1, {task: score(report[task]) for task in tasks if task in report})
        progress(index + 1)
        seconds_scoring += time.perf_counter() - begin

    algorithm.save_on_every_step, algorithm.evaluate_on_every_step = True, False
    algorithm.save_merged_model = observe
    if algorithm._program is None:  # some of them look at the program's task pool even when they do not evaluate
        algorithm._program = SimpleNamespace(taskpool=evaluator.taskpool)
    begin = time.perf_counter()
    algorithm.run(modelpool)
    return matrix, time.perf_counter() - begin - seconds_scoring
