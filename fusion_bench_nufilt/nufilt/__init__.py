"""NUFILT's mathematics on tensors. It needs nothing but torch, reads no files and
prints nothing.
"""

from typing import TYPE_CHECKING

from fusion_bench_nufilt.utils import lazy_exports

if TYPE_CHECKING:
    from .low_rank import LowRank
    from .options import FusionConfig
    from .step import LayerReport

__all__ = ["FusionConfig", "LayerReport", "LowRank"]

__getattr__ = lazy_exports(
    __name__, {"FusionConfig": "options", "LayerReport": "step", "LowRank": "low_rank"}
)
