"""What every continual merging method shares: the stream of tasks, its scores, its files."""

from .algorithm import ContinualMergingAlgorithm
from .config import ProtocolConfig
from .evaluation import Evaluator, TasksByName
from .metrics import METRICS, AccuracyMatrix, Metric
from .stream import task_order, tasks_to_score

__all__ = [
    "METRICS",
    "AccuracyMatrix",
    "ContinualMergingAlgorithm",
    "Evaluator",
    "Metric",
    "ProtocolConfig",
    "TasksByName",
    "task_order",
    "tasks_to_score",
]
