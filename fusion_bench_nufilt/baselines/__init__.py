"""The methods that NUFILT is compared with, under the protocol that it runs under."""

from .finetuning import SequentialFineTuning
from .fusionbench import BatchMethodBaseline, ContinualMethodBaseline
from .wemoe import LoRAWEMoE

__all__ = ["BatchMethodBaseline", "ContinualMethodBaseline", "LoRAWEMoE", "SequentialFineTuning"]
