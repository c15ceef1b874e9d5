"""Which layers of a model are merged, how parameters hold them, and what happens to every other
parameter.
"""

from fusion_bench_nufilt.layers.coverage import Coverage, coverage
from fusion_bench_nufilt.layers.heads import Heads
from fusion_bench_nufilt.layers.selection import select_layers
from fusion_bench_nufilt.layers.targets import TargetConfig

__all__ = ["Coverage", "Heads", "TargetConfig", "coverage", "select_layers"]
