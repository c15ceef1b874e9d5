"""Which layers of a model are merged, how parameters hold them, and what happens to every other parameter."""

from fusion_bench_nufilt.layers.checks import check_model
from fusion_bench_nufilt.layers.coverage import Coverage, coverage
from fusion_bench_nufilt.layers.other_params import merge_other_params, running_mean
from fusion_bench_nufilt.layers.selection import layer_name, select_layers
from fusion_bench_nufilt.layers.targets import OtherParams, TargetConfig
from fusion_bench_nufilt.layers.views import View, views

__all__ = [
    "Coverage",
    "OtherParams",
    "TargetConfig",
    "View",
    "check_model",
    "coverage",
    "layer_name",
    "merge_other_params",
    "running_mean",
    "select_layers",
    "views",
]
