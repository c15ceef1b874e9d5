"""The plan, the engine and the writer of a merge: of folders of any size, without loading a model,
and of models in memory.
"""

from typing import TYPE_CHECKING

from fusion_bench_nufilt.utils import lazy_exports

if TYPE_CHECKING:
    from fusion_bench_nufilt.methods.options import Settings

    from .folders import merge_folders
    from .plan import Plan
    from .planning import plan_merge

__all__ = ["Plan", "Settings", "merge_folders", "plan_merge"]

__getattr__ = lazy_exports(
    __name__,
    {
        "Plan": "plan",
        "Settings": ".methods.options",
        "merge_folders": "folders",
        "plan_merge": "planning",
    },
)
