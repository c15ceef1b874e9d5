"""Numbers printed in the paper (Qiu et al., ICLR 2026, arXiv 2509.21413), in per cent.

``published.csv`` has all of them. They are shown beside what is measured only where models, number of tasks, settings
and the set of orders agree.
"""

import csv
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

_ORDERS = range(42, 52)  # the seeds of the paper's ten orders
_FLAN_T5 = "flan-t5-base_glue"
_IN_ORDER = "method.shuffle_order=false"  # its one order, the alphabetical one
_FREE_OF_ORDER = ("pretrained", "individual")
# What these tables measure is what a comparison measures; LLaVA's setting is not printed, and seconds are a machine's.
_COMPARABLE = ("main", "single", "tasks", "ablation", "flan_t5")


class Number(NamedTuple):
    """A printed number, its standard deviation over the orders, and a note on it, which may be empty."""

    value: float
    deviation: float | None
    note: str


Published = dict[str, Number]  # the numbers of one method, by metric or task


@cache
def printed_tables() -> dict[tuple[str, str], dict[str, Published]]:
    """Return all numbers of the paper, by table and model pool, and by method."""
    tables: dict[tuple[str, str], dict[str, Published]] = {}
    with Path(__file__).with_name("published.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            deviation = float(row["deviation"]) if row["deviation"] else None
            methods = tables.setdefault((row["table"], row["modelpool"]), {})
            number = Number(float(row["value"]), deviation, row["note"])
            methods.setdefault(row["method"], {})[row["metric"]] = number
    return tables


def published(modelpool: str, overrides: Sequence[str], seeds: Sequence[int]) -> dict[str, Published]:
    """Return the paper's numbers for a comparison, by method, without those that were printed for another setting.

    Args:
        modelpool: the name of the model pool.
        overrides: those of `fusion_bench` for all methods; one that chooses a device changes no number.
        seeds: those of the comparison.
    """
    changing = [override for override in overrides if not override.startswith("fabric.accelerator=")]
    if changing != ([_IN_ORDER] if modelpool == _FLAN_T5 else []):
        return {}
    found: dict[str, Published] = {}
    for table in _COMPARABLE:
        for method, numbers in printed_tables().get((table, modelpool), {}).items():
            if modelpool == _FLAN_T5 or method in _FREE_OF_ORDER or list(seeds) == list(_ORDERS):
                found[method] = found.get(method, {}) | numbers
    for method, numbers in printed_tables().get(("overhead", modelpool), {}).items():
        if ":" in method and list(seeds) == list(_ORDERS):  # NUFILT with other numbers of steps
            found[method] = {"ACC": numbers["ACC"]._replace(note="")}
    if "nufilt/adapter_only" in found:  # it is open which of the two forms made the row
        found["nufilt/adapter_alone"] = found["nufilt/adapter_only"]
    return found


def paper_settings(modelpool: str) -> dict[str, tuple[str, ...]]:
    """Return the settings that the paper has for a model pool and our configs do not, by method."""
    smaller = ("scaling_factor=0.1",)  # its lambda for 14 and 20 tasks
    more_tasks = modelpool.endswith(("TALL14", "TALL20"))
    return dict.fromkeys(("task_arithmetic", "ties_merging", "knots_ties"), smaller) if more_tasks else {}
