"""DOP of FusionBench with few steps of its optimiser, which take two thirds of the time of a
comparison of all methods; commands that import this module begin it so.
"""

from functools import wraps

from fusion_bench.method.dop.dop import ContinualDOPForCLIP

FEW = 3
_optimize_weight = ContinualDOPForCLIP._optimize_weight


@wraps(_optimize_weight)
def _in_few_steps(self, *args, **kwargs):
    self.num_steps = min(self.num_steps, FEW)
    return _optimize_weight(self, *args, **kwargs)


ContinualDOPForCLIP._optimize_weight = _in_few_steps
