"""The methods that NUFILT is compared with, under the protocol that it runs under."""

from fusion_bench_nufilt import clip as clip

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
