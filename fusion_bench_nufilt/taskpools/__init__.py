"""Task pools that FusionBench lacks. The harnesses that they score with are imported, or run, when they are used."""

from .lm_harness import LMEvalTaskPool
from .lmms_harness import LMMSEvalTaskPool

__all__ = ["LMEvalTaskPool", "LMMSEvalTaskPool"]
