"""What every continual merging method shares: the stream of tasks, its scores, its files."""

from fusion_bench_nufilt.results.metrics import METRICS, AccuracyMatrix, Metric

from .algorithm import ContinualMergingAlgorithm
from .evaluation import Evaluator, TasksByName
from .protocol import ProtocolConfig
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
