"""What a model is, in a folder or in memory, and which matrices of it are merged."""

from typing import TYPE_CHECKING

from fusion_bench_nufilt.utils import lazy_exports

if TYPE_CHECKING:
    from .heads import Heads
    from .layers import Coverage, select_layers

__all__ = ["Coverage", "Heads", "select_layers"]

__getattr__ = lazy_exports(
    __name__,
    {"Coverage": "layers", "Heads": "heads", "select_layers": "layers"},
)
