"""Task pools that FusionBench lacks; each needs an extra of its own, imported when it is used."""

from .lm_harness import LMEvalTaskPool

__all__ = ["LMEvalTaskPool"]
