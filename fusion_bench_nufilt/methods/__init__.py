"""The layer-wise methods, and their registry."""

from typing import TYPE_CHECKING

from fusion_bench_nufilt.utils import lazy_exports

if TYPE_CHECKING:
    from .base import LayerMethod
    from .options import ORDER_FREE
    from .registry import METHODS, find_method

__all__ = ["METHODS", "ORDER_FREE", "LayerMethod", "find_method"]

__getattr__ = lazy_exports(
    __name__,
    {
        "LayerMethod": "base",
        "METHODS": "registry",
        "ORDER_FREE": "options",
        "find_method": "registry",
    },
)
