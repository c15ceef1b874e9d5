"""The method on tensors. It needs torch alone, reads no file and prints nothing."""

from .config import FusionConfig
from .fusion import LayerReport, fuse_each, fuse_layers
from .weights import LowRank, check_layers

__all__ = ["FusionConfig", "LayerReport", "LowRank", "check_layers", "fuse_each", "fuse_layers"]
