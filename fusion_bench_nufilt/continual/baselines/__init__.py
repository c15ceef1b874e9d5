"""The methods with which NUFILT is compared, under the same protocol."""

from fusion_bench_nufilt.continual import compat as compat

from .adamerging import NewTaskAdaMergingAlgorithm
from .finetuning import SequentialFineTuning
from .fusionbench import BatchMethodBaseline, ContinualMethodBaseline
from .knots import KnotsTiesMergingAlgorithm
from .wemoe import LoRAWEMoE

__all__ = [
    "BatchMethodBaseline",
    "ContinualMethodBaseline",
    "KnotsTiesMergingAlgorithm",
    "LoRAWEMoE",
    "NewTaskAdaMergingAlgorithm",
    "SequentialFineTuning",
]
