"""Task pools that FusionBench lacks; what they score with is imported, or run, when it is used."""

from .lm_harness import LMEvalTaskPool
from .lmms_harness import LMMSEvalTaskPool

__all__ = ["LMEvalTaskPool", "LMMSEvalTaskPool"]
