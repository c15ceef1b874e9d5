"""NUFILT's mathematics on tensors. It needs nothing but torch, reads no files and prints
nothing.
"""

from typing import TYPE_CHECKING

from fusion_bench_nufilt.utils.lazy import lazy_exports

if TYPE_CHECKING:
    from .config import FusionConfig
    from .fusion import LayerReport, check_layers, fuse_each, fuse_layers
    from .step import LowRank

__all__ = ["FusionConfig", "LayerReport", "LowRank", "check_layers", "fuse_each", "fuse_layers"]

__getattr__ = lazy_exports(
    __name__,
    {
        "FusionConfig": "config",
        "LayerReport": "fusion",
        "LowRank": "step",
        "check_layers": "fusion",
        "fuse_each": "fusion",
        "fuse_layers": "fusion",
    },
)
