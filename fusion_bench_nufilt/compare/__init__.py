"""Comparing continual merging methods: every method on every seed of one model pool."""

from fusion_bench_nufilt.results.comparison_files import save_report
from fusion_bench_nufilt.results.comparison_tables import as_rich, main_table, task_table
from fusion_bench_nufilt.results.overhead import overhead_table, printed_overhead

from .configs import Methods, compose_run
from .presets import preset_specs
from .run import compare
from .specs import RunSpec, parse_methods, parse_seeds
from .summary import Comparison
from .trackers import is_tracker, log_comparison, trackers

__all__ = [
    "Comparison",
    "Methods",
    "RunSpec",
    "as_rich",
    "compare",
    "compose_run",
    "is_tracker",
    "log_comparison",
    "main_table",
    "overhead_table",
    "parse_methods",
    "parse_seeds",
    "preset_specs",
    "printed_overhead",
    "save_report",
    "task_table",
    "trackers",
]
