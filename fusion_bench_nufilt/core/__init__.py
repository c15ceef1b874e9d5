"""NUFILT's mathematics on tensors. It needs nothing but torch, reads no files and prints
nothing.
"""

from .config import FusionConfig
from .fusion import LayerReport, fuse_each, fuse_layers
from .weights import LowRank, check_layers

__all__ = ["FusionConfig", "LayerReport", "LowRank", "check_layers", "fuse_each", "fuse_layers"]
