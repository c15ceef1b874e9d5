"""Task pools that FusionBench lacks. The harnesses that they score with are imported, or run, when they are used."""

from .harness import LMEvalTaskPool, LMMSEvalTaskPool

__all__ = ["LMEvalTaskPool", "LMMSEvalTaskPool"]
