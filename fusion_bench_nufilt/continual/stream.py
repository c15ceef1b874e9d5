"""The order in which models arrive, and what is scored on the way."""

import random
from collections.abc import Sequence
from typing import Literal

Evaluate = Literal["last", "diagonal", "every_step"]


def task_order(names: Sequence[str], *, shuffle: bool, seed: int) -> list[str]:
    """Names in the order of the run: as given, or shuffled as in the paper (its ten orders are seeds 42 to 51).

    FusionBench's continual methods use the same order for the same seed.
    """
    order = list(names)
    if shuffle:
        random.Random(seed).shuffle(order)
    return order


def tasks_to_score(order: Sequence[str], step: int, evaluate: Evaluate) -> list[str]:
    """Tasks to score after a step (from 1).

    Args:
        order: all tasks in merging order.
        step: how many of them are merged.
        evaluate: ``last`` scores all tasks after the last step; ``diagonal`` also each task right after its own step,
            all that ACC and BWT need (2T-1 scores); ``every_step`` all tasks seen so far after each (T(T+1)/2 scores).
    """
    if step == len(order) or evaluate == "every_step":
        return list(order[:step])
    return [order[step - 1]] if evaluate == "diagonal" else []
