"""What every continual merging method shares: the stream of tasks, its scores, its files."""

from .algorithm import ContinualMergingAlgorithm
from .baseline import run_observed
from .evaluation import Evaluator
from .metrics import AccuracyMatrix
from .stream import task_order, tasks_to_score

__all__ = [
    "AccuracyMatrix",
    "ContinualMergingAlgorithm",
    "Evaluator",
    "run_observed",
    "task_order",
    "tasks_to_score",
]
