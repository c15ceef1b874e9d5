"""What the harnesses have in common: tasks by model, and results by task."""

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf


def by_model(tasks: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """Tasks by the names of the models; a list of names stands for both."""
    plain: Any = OmegaConf.to_container(tasks) if OmegaConf.is_config(tasks) else tasks
    return dict(plain) if isinstance(plain, Mapping) else {name: name for name in plain}


def first_metric(task: str, results: Mapping[str, Mapping[str, Any]], metrics: Sequence[str]) -> float:
    """The first of some metrics that a task has.

    Args:
        task: its name.
        results: by task, such as ``{"acc,none": 0.5, "acc_stderr,none": 0.01}``; after the comma is a filter.
        metrics: without filters.

    Raises:
        ValueError: it has none of them; lists those it has.
    """
    found: dict[str, Any] = {}
    for key, value in results[task].items():
        if "," in key:
            found.setdefault(key.partition(",")[0], value)
    for metric in metrics:
        if metric in found:
            return float(found[metric])
    there = sorted(name for name in found if "_stderr" not in name)
    raise ValueError(f"task '{task}' has no metric {' or '.join(metrics)}, only {', '.join(there)}")
