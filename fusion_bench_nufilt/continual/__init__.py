"""What every continual merging method shares: the stream of tasks, its scores, its files."""

from .algorithm import ContinualMergingAlgorithm
from .config import ProtocolConfig
from .evaluation import Evaluator
from .metrics import AccuracyMatrix
from .stream import task_order, tasks_to_score

__all__ = [
    "AccuracyMatrix",
    "ContinualMergingAlgorithm",
    "Evaluator",
    "ProtocolConfig",
    "task_order",
    "tasks_to_score",
]
