"""What every continual merging method shares: the stream of tasks, its scores, its files."""

from fusion_bench_nufilt.continual import compat as compat
from fusion_bench_nufilt.pages.metrics import METRICS, AccuracyMatrix

from .algorithm import ContinualMergingAlgorithm
from .evaluation import Evaluator
from .protocol import ProtocolConfig, task_order

__all__ = [
    "METRICS",
    "AccuracyMatrix",
    "ContinualMergingAlgorithm",
    "Evaluator",
    "ProtocolConfig",
    "task_order",
]
