"""What every continual merging method shares: the stream of tasks, its scores, its files."""

from .algorithm import ContinualMergingAlgorithm
from .baseline import BatchMethodBaseline, ContinualMethodBaseline
from .evaluation import Evaluator
from .metrics import AccuracyMatrix
from .stream import task_order, tasks_to_score

__all__ = [
    "AccuracyMatrix",
    "BatchMethodBaseline",
    "ContinualMergingAlgorithm",
    "ContinualMethodBaseline",
    "Evaluator",
    "task_order",
    "tasks_to_score",
]
