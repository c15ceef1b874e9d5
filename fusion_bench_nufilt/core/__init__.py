"""The method on tensors. It needs torch alone, reads no file and prints nothing."""

from .checks import check_layers
from .config import FusionConfig
from .fusion import LayerReport, fuse_each, fuse_layers
from .low_rank import LowRank

__all__ = ["FusionConfig", "LayerReport", "LowRank", "check_layers", "fuse_each", "fuse_layers"]
