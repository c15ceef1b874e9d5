"""The layer-wise methods, and their registry."""

from typing import TYPE_CHECKING

from fusion_bench_nufilt.utils import lazy_exports

if TYPE_CHECKING:
    from .base import LayerMethod, Report, State
    from .nufilt import Nufilt
    from .options import ORDER_FREE
    from .registry import METHODS, find_method
    from .spectral import Spectral

__all__ = [
    "METHODS",
    "ORDER_FREE",
    "LayerMethod",
    "Nufilt",
    "Report",
    "Spectral",
    "State",
    "find_method",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "LayerMethod": "base",
        "METHODS": "registry",
        "Nufilt": "nufilt",
        "ORDER_FREE": "options",
        "Report": "base",
        "Spectral": "spectral",
        "State": "base",
        "find_method": "registry",
    },
)
