"""What every continual merging method shares: the stream of tasks, its scores, its files."""

from .algorithm import ContinualMergingAlgorithm
from .evaluation import Evaluator
from .metrics import AccuracyMatrix
from .stream import task_order

__all__ = ["AccuracyMatrix", "ContinualMergingAlgorithm", "Evaluator", "task_order"]
