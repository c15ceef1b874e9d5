"""Null-space filtering (NUFILT) for data-free continual model merging, as a FusionBench plugin."""

from fusion_bench_nufilt.algorithm import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.core import FusionConfig, fuse_layers

__all__ = ["FusionConfig", "NufiltContinualMergingAlgorithm", "fuse_layers"]
