"""Null-space filtering (NUFILT) for data-free continual model merging, as a FusionBench plugin."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_bench_nufilt.continual.baselines import (
        BatchMethodBaseline,
        ContinualMethodBaseline,
        KnotsTiesMergingAlgorithm,
        LoRAWEMoE,
        NewTaskAdaMergingAlgorithm,
        SequentialFineTuning,
    )
    from fusion_bench_nufilt.continual.layerwise import (
        LayerwiseMergingAlgorithm,
        NufiltContinualMergingAlgorithm,
    )
    from fusion_bench_nufilt.merge.fuse import fuse_layers
    from fusion_bench_nufilt.merge.load_task import load_task
    from fusion_bench_nufilt.nufilt import FusionConfig

    __version__: str

__all__ = [
    "BatchMethodBaseline",
    "ContinualMethodBaseline",
    "FusionConfig",
    "KnotsTiesMergingAlgorithm",
    "LayerwiseMergingAlgorithm",
    "LoRAWEMoE",
    "NewTaskAdaMergingAlgorithm",
    "NufiltContinualMergingAlgorithm",
    "SequentialFineTuning",
    "fuse_layers",
    "load_task",
]

# The modules of these names; all others are in continual.baselines.
_HOMES = {
    "FusionConfig": "nufilt",
    "LayerwiseMergingAlgorithm": "continual.layerwise",
    "NufiltContinualMergingAlgorithm": "continual.layerwise",
    "fuse_layers": "merge.fuse",
    "load_task": "merge.load_task",
}


def __getattr__(name: str) -> Any:
    """Import torch and FusionBench only when needed, so that `nufilt --help` and `nufilt merge`
    start faster.
    """
    if name in __all__:
        home = _HOMES.get(name, "continual.baselines")
        return getattr(import_module(f"{__name__}.{home}"), name)
    if name == "__version__":
        return version("fusion-bench-nufilt")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
