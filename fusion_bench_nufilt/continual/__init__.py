"""What every continual merging method shares: the stream of tasks, its scores, its files."""

from fusion_bench_nufilt.methods.options import ProtocolConfig
from fusion_bench_nufilt.pages.metrics import METRICS, AccuracyMatrix

from . import compat as compat
from .algorithm import ContinualMergingAlgorithm, task_order
from .evaluation import Evaluator

__all__ = [
    "METRICS",
    "AccuracyMatrix",
    "ContinualMergingAlgorithm",
    "Evaluator",
    "ProtocolConfig",
    "task_order",
]
