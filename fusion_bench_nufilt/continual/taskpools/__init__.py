"""Task pools that FusionBench lacks."""

from .harness import LMEvalTaskPool, LMMSEvalTaskPool

__all__ = ["LMEvalTaskPool", "LMMSEvalTaskPool"]
