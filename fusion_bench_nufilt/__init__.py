"""Null-space filtering (NUFILT) for data-free continual model merging, as a FusionBench plugin."""

from typing import TYPE_CHECKING, Any

from fusion_bench_nufilt.core import FusionConfig, fuse_layers

if TYPE_CHECKING:
    from fusion_bench_nufilt.algorithm import NufiltContinualMergingAlgorithm

__all__ = ["FusionConfig", "NufiltContinualMergingAlgorithm", "fuse_layers"]


def __getattr__(name: str) -> Any:
    """FusionBench is imported when the algorithm is asked for: `nufilt merge` has better use for its 300 MB."""
    if name == "NufiltContinualMergingAlgorithm":
        from fusion_bench_nufilt.algorithm import NufiltContinualMergingAlgorithm

        return NufiltContinualMergingAlgorithm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
