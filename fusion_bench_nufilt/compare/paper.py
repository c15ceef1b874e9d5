"""The comparisons of the paper (Qiu et al., ICLR 2026, arXiv 2509.21413), and the numbers that it prints for them.

``published.csv`` has them in per cent. They stand beside measured numbers only where models, number of tasks, settings
and orders agree.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig

from fusion_bench_nufilt.pages.content import Published
from fusion_bench_nufilt.stream.models import PRETRAINED

from .configs import compose_run, quiet, taskpool_config
from .experiment import Experiment
from .overrides import key_of, without_method
from .specs import NEED_DATA, RunSpec, parse_methods

_ORDERS = list(range(42, 52))  # the seeds of the paper's ten orders
_FLAN_T5, _LLAVA = "flan-t5-base_glue", "llava-1.5-7b"
_IN_ORDER = "method.shuffle_order=false"  # the paper's one order, the alphabetical one
_FREE_OF_ORDER = ("pretrained", "individual")
# These tables have the metrics of a comparison; seconds depend on the machine.
_COMPARABLE = ("main", "single", "tasks", "ablation", "flan_t5")


@cache
def printed_tables() -> dict[tuple[str, str], dict[str, Published]]:
    tables: dict[tuple[str, str], dict[str, Published]] = {}
    with Path(__file__).with_name("published.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            deviation = float(row["deviation"]) if row["deviation"] else None
            number = {"value": float(row["value"]), "deviation": deviation, "note": row["note"]}
            methods = tables.setdefault((row["table"], row["modelpool"]), {})
            methods.setdefault(row["method"], {})[row["metric"]] = number
    return tables


def published(modelpool: str, overrides: Sequence[str], seeds: Sequence[int]) -> dict[str, Published]:
    """Return the paper's numbers for a comparison, by method, without those for another setting."""
    if modelpool == _LLAVA:  # each has the note that the paper does not print its setting
        return printed_tables()["llava", _LLAVA]
    changing = [override for override in overrides if not override.startswith("fabric.accelerator=")]
    if changing != ([_IN_ORDER] if modelpool == _FLAN_T5 else []):
        return {}
    found: dict[str, Published] = {}
    orders = modelpool == _FLAN_T5 or list(seeds) == _ORDERS
    for table in _COMPARABLE:
        for method, numbers in printed_tables().get((table, modelpool), {}).items():
            if orders or method in _FREE_OF_ORDER:
                found[method] = found.get(method, {}) | numbers
    for method, numbers in printed_tables().get(("overhead", modelpool), {}).items():
        if orders and ":" in method:  # NUFILT with other numbers of steps
            found[method] = {"ACC": numbers["ACC"] | {"note": ""}}
    if "nufilt/adapter_only" in found:  # the paper does not say which of the two forms it shows
        found["nufilt/adapter_alone"] = found["nufilt/adapter_only"]
    return found


def paper_settings(modelpool: str) -> dict[str, tuple[str, ...]]:
    """Return, by method, the settings in which the paper differs from our configs on a model pool."""
    if not modelpool.endswith(("TALL14", "TALL20")):
        return {}
    return dict.fromkeys(("task_arithmetic", "ties_merging", "knots_ties"), ("scaling_factor=0.1",))


class Panel(NamedTuple):
    """A panel of the paper's sensitivity figure, which varies one setting and keeps the others fixed."""

    symbol: str
    key: str
    values: tuple[int, ...]
    fixed: Mapping[str, int]


_WIDTH = 768  # of the models that the ranks below are for
SENSITIVITY = (
    Panel("r_p", "null_rank", (0, 8, 16, 32, 64, 128, 256, 512, _WIDTH), {"lora_rank": 0, "task_rank": 0}),
    Panel("r_l", "lora_rank", (0, 4, 8, 16, 32, 64, 128), {"null_rank": 128, "task_rank": 8}),
    Panel("r_v", "task_rank", (0, 1, 2, 4, 8, 16, 32, 64, 128), {"null_rank": 128, "lora_rank": 16}),
    Panel("steps", "max_steps", (25, 50, 100), {"null_rank": 128, "lora_rank": 64, "task_rank": 8}),
)
"""The panels of the paper's Section 5.3; the grids are ours, since it prints none."""
_METHODS = {
    "ablation": ("nufilt/naive", "nufilt/filter_only", "nufilt/adapter_only", "nufilt"),
    "paper": (
        *("sequential_finetuning", "weight_average", "task_arithmetic", "ties_merging", "magmax", "adamerging"),
        *("lora_wemoe", "wudi", "iso_c", "knots_ties", "tsvm", "opcm", "nufilt"),
    ),
    "overhead": (
        *("task_arithmetic", "opcm", "wudi", "adamerging", "lora_wemoe:form=released"),
        *(f"nufilt:max_steps={steps}" for steps in (25, 50, 100)),
    ),
}
#: The baselines of the paper's main table that need no data.
DATA_FREE = tuple(method for method in _METHODS["paper"] if method not in {*NEED_DATA, "nufilt"})
#: The non-default form of methods whose formula in the paper is not that of their released code.
_OTHER_FORM = {"ties_merging": "released", "magmax": "paper", "adamerging": "released", "lora_wemoe": "released"}
#: The form of the printed numbers, where it is known.
_PRINTED_FORM = {"lora_wemoe": "released"}


def preset_specs(name: str, modelpool: str, overrides: Sequence[str], *, with_data: bool = False) -> list[RunSpec]:
    """Return the methods of one of the paper's comparisons.

    ``ablation`` has the paper's four rows; ``paper`` the methods of its main table with its settings, by both formulas
    where there are two; ``sensitivity`` the panels of :data:`SENSITIVITY`, and ``ranks`` those that vary a rank;
    ``overhead`` the rows of its table of costs. Methods that need data are there only ``with_data``, and where the pool
    has that data. A comparison scales their ranks to the width.
    """
    if with_data and name not in ("paper", "overhead"):
        raise ValueError(f"--with-data goes with --preset paper or overhead: no method of '{name}' needs data")
    if name in ("sensitivity", "ranks"):
        with quiet():
            width = Experiment(_pools(modelpool, overrides)).width
        panels = [panel for panel in SENSITIVITY if name == "sensitivity" or panel.key != "max_steps"]
        return [spec for panel in panels for spec in panel_specs(panel, width)]
    if name not in _METHODS:
        names = ", ".join(sorted([*_METHODS, "ranks", "sensitivity"]))
        raise ValueError(f"there is no preset '{name}'; there are: {names}")
    lacking = NEED_DATA.keys() - (_methods_with_data(modelpool, overrides) if with_data else [])
    rows = [method for method in _METHODS[name] if method.split(":")[0] not in lacking]
    if name == "paper":
        rows = _rows_of_paper(rows, modelpool)
    return [replace(spec, preset=True) for spec in parse_methods(",".join(rows), overrides)]


def _rows_of_paper(methods: Sequence[str], modelpool: str) -> list[str]:
    """Return the methods that the paper shows for a model pool, with its settings, in each of their forms."""
    tables = {table: rows for (table, pool), rows in printed_tables().items() if pool == modelpool}
    shown = tables.get("flan_t5", tables.get("llava", methods))  # tables with fewer methods than the main one
    forms = _OTHER_FORM | ({"task_arithmetic": "released"} if modelpool == _FLAN_T5 else {})
    rows = []
    for method in (method for method in methods if method in shown):
        settings = paper_settings(modelpool).get(method, ())
        rows.append(":".join([f"{method}={method}", *settings]))
        if form := forms.get(method):
            rows.append(":".join([f"{method} ({form})={method}", f"form={form}", *settings]))
    return rows


def _pools(modelpool: str, overrides: Sequence[str]) -> DictConfig:
    return compose_run(without_method([f"modelpool={modelpool}", *overrides]))


def with_fitting_ranks(spec: RunSpec, experiment: Experiment, overrides: Sequence[str]) -> RunSpec:
    """Return a method of a preset with ranks for the models' width, except those that the overrides give."""
    if not (spec.preset and spec.method.startswith("nufilt")):
        return spec
    config, given = compose_run(spec.overrides).method, {key_of(word) for word in overrides}
    ranks = {key: rank_for_width(key, config[key], experiment.width) for key in ("null_rank", "lora_rank")}
    changed = [f"{key}={rank}" for key, rank in ranks.items() if rank != config[key] and f"method.{key}" not in given]
    overrides = (*spec.overrides, *(f"method.{setting}" for setting in changed))
    return replace(spec, overrides=overrides, settings=(*spec.settings, *changed))


def _methods_with_data(modelpool: str, overrides: Sequence[str]) -> list[str]:
    """Return the methods whose data the pools have: unlabelled (CLIP, Flan-T5) or training data (CLIP)."""
    config = _pools(modelpool, overrides)
    taskpool, train = taskpool_config(config), config.modelpool.get("train_datasets") or {}
    kind = str(taskpool.get("_target_") or taskpool.get("type")).rpartition(".")[2]
    trained = kind == "CLIPVisionModelTaskPool" and {*config.modelpool.models} - {PRETRAINED} <= {*train}
    has = {"training": trained, "unlabelled": kind in ("CLIPVisionModelTaskPool", "FlanT5GLUETextGenerationTaskPool")}
    return [method for method, data in NEED_DATA.items() if has[data]]


def printed_row(spec: RunSpec, form: str | None, modelpool: str, printed: Mapping[str, Published]) -> Published:
    """Return the printed numbers for a method if it is run with the paper's settings.

    They stand beside either form, unless it is known which was printed. A ``released`` form needs no note about it.
    """
    given = tuple(setting for setting in spec.settings if not setting.startswith("form="))
    if _PRINTED_FORM.get(spec.method, form) != form:
        return {}
    as_printed = given == paper_settings(modelpool).get(spec.method, ())
    row = printed.get(spec.method if as_printed else ":".join((spec.method, *given)), {})
    about_it = {key for key, number in row.items() if form == "released" and "form=released" in number["note"]}
    return row | {key: {**row[key], "note": ""} for key in about_it}


def panel_specs(panel: Panel, width: int) -> list[RunSpec]:
    fixed = {key: rank_for_width(key, value, width) for key, value in panel.fixed.items()}
    rows = []
    for value in sorted({rank_for_width(panel.key, value, width) for value in panel.values}):
        settings = tuple(f"{key}={number}" for key, number in {**fixed, panel.key: value}.items())
        overrides = ("method=nufilt", *(f"method.{setting}" for setting in settings))
        rows.append(RunSpec(f"{panel.symbol} {value}", overrides, "nufilt", settings))
    return rows


def rank_for_width(key: str, value: int, width: int) -> int:
    """Return an option, ``value`` in the paper at width 768, for models whose narrowest layer has d_i = ``width``.

    Below 768, r_p and r_l are in proportion to the width, rounded down; no rank is above it.
    """
    if key in ("null_rank", "lora_rank") and value:
        return width if value == _WIDTH else max(1, value * min(width, _WIDTH) // _WIDTH)
    return min(value, width) if key == "task_rank" else value
