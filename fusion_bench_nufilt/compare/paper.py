"""The comparisons of the paper (Qiu et al., ICLR 2026, arXiv 2509.21413), and the numbers that it
prints for them.

``paper.yaml`` has the methods and their settings, and ``published/`` the paper's tables, with the
numbers in per cent. They stand beside measured ones only where models, number of tasks, settings,
orders and test data agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from omegaconf import DictConfig

from fusion_bench_nufilt.continual.models import PRETRAINED
from fusion_bench_nufilt.continual.protocol import DeviceConfig, ProtocolConfig
from fusion_bench_nufilt.pages.content import Published
from fusion_bench_nufilt.utils.options import with_scope

from .configs import compose_run, quiet, taskpool_config
from .experiment import Experiment
from .overrides import key_of, without_method
from .specs import NEED_DATA, RunSpec, parse_methods

_PAPER = yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text())
_WIDTH = 768  # of the models that its ranks are for
#: The panels of the paper's sensitivity figure.
SENSITIVITY = _PAPER["sensitivity"]
#: The baselines of the paper's main table that need no data.
DATA_FREE = [
    method for method in _PAPER["presets"]["paper"] if method not in {*NEED_DATA, "nufilt"}
]

_FLAN_T5, _LLAVA = "flan-t5-base_glue", "llava-1.5-7b"
_IN_ORDER = (
    "method.shuffle_order=false"  # the one order of the paper's Flan-T5, the alphabetical one
)
#: Further keys that change no score: what is measured of a run, and where it is run.
_HARMLESS = {
    *("fabric.accelerator", "fabric.devices", "hydra.searchpath", "method.evaluate"),
    *(f"method.{name}" for name in with_scope([ProtocolConfig, DeviceConfig], "run")),
}
# These tables have the metrics of a comparison; seconds depend on the machine.
_COMPARABLE = ("main", "single", "tasks", "ablation", "flan_t5", "steps")


@cache
def printed_numbers() -> pd.DataFrame:
    """Return every number that the paper prints, one in each row, and what it belongs to."""
    tables = []
    for file in sorted(Path(__file__).with_name("published").glob("*.csv")):
        wide = pd.read_csv(file, dtype=str, keep_default_na=False)
        # A column is a model pool or a metric, whichever a row does not name.
        across = "metric" if "modelpool" in wide else "modelpool"
        named = [name for name in ("modelpool", "metric", "method", "note") if name in wide]
        long = wide.melt(named, var_name=across, value_name="printed").assign(table=file.stem)
        tables.append(long[long["printed"] != ""])
    rows = pd.concat(tables, ignore_index=True).fillna({"note": ""})
    numbers = rows.pop("printed").str.split(" ± ", expand=True).astype(float)
    return rows.assign(value=numbers[0], deviation=numbers[1])


def printed(table: str, modelpool: str) -> dict[str, Published]:
    """Return the numbers of one of the paper's tables for a model pool, by method and metric."""
    rows = printed_numbers()
    rows = rows[(rows["table"] == table) & (rows["modelpool"] == modelpool)]
    numbers: dict[str, Published] = {}
    for row in rows.itertuples():
        deviation = None if pd.isna(row.deviation) else row.deviation
        number = {"value": row.value, "deviation": deviation, "note": row.note}
        numbers.setdefault(row.method, {})[row.metric] = number
    return numbers


def published(
    modelpool: str,
    overrides: Sequence[str],
    seeds: Sequence[int],
    validation: bool | None = None,
) -> tuple[dict[str, Published], str]:
    """Return the paper's numbers for a comparison, by method, and why others that it prints for the
    model pool are not among them.
    """
    if modelpool == _LLAVA:  # each has the note that the paper does not print its setting
        return printed("llava", _LLAVA), ""
    numbers: dict[str, Published] = {}
    for table in _COMPARABLE:
        for method, row in printed(table, modelpool).items():
            numbers[method] = numbers.get(method, {}) | row
    changing = [override for override in overrides if not _is_harmless(override)]
    if modelpool == _FLAN_T5 and _IN_ORDER not in changing:
        why = f"are for one order, which {_IN_ORDER} takes"
    elif changing and changing != [_IN_ORDER]:
        other = next(override for override in changing if override != _IN_ORDER)
        why = f"are for another setting than {other}"
    elif changing and modelpool != _FLAN_T5:
        why = f"are for other orders than {_IN_ORDER}"
    elif validation is not None:
        why = "are for all test data"
    elif modelpool != _FLAN_T5 and sorted(seeds) != _PAPER["seeds"]:
        # The single models do not depend on the order.
        single: dict[str, Published] = {}
        for name in ("pretrained", "individual"):
            if name in numbers:
                single[name] = numbers[name]
        why = "of merged models are means over ten orders, those of --seeds 42:52"
        return single, _hidden(why) if numbers else ""
    else:
        return numbers, ""
    return {}, _hidden(why) if numbers else ""


def _hidden(why: str) -> str:
    return f"the paper's numbers {why}, and are not shown"


def _is_harmless(override: str) -> bool:
    """Tell whether an override changes no score: where and with how many processes it is run."""
    key = key_of(override)
    return key in _HARMLESS or key.split(".")[-1] in ("num_workers", "pin_memory")


def paper_settings(modelpool: str, method: str) -> tuple[str, ...]:
    """Return the settings in which the paper differs from our configs on a model pool."""
    return tuple(
        _PAPER["many_tasks"].get(method, ()) if modelpool.endswith(("TALL14", "TALL20")) else ()
    )


def preset_specs(
    name: str, modelpool: str, overrides: Sequence[str], *, with_data: bool = False
) -> list[RunSpec]:
    """Return the methods of one of the paper's comparisons.

    ``paper`` has them by both formulas where there are two; ``sensitivity`` is the panels of
    :data:`SENSITIVITY`, and ``ranks`` those that vary a rank. Methods that need data are there only
    ``with_data``, and where the pool has that data. A comparison scales the ranks of all to the
    width.
    """
    if with_data and name not in ("paper", "overhead"):
        raise ValueError(
            f"--with-data goes with --preset paper or overhead: no method of '{name}' needs data"
        )
    pools = without_method([f"modelpool={modelpool}", *overrides])
    if name in ("sensitivity", "ranks"):
        with quiet():
            width = Experiment(compose_run(pools)).width
        panels = [
            panel for panel in SENSITIVITY if name == "sensitivity" or panel["key"] != "max_steps"
        ]
        return [spec for panel in panels for spec in panel_specs(panel, width)]
    if name not in _PAPER["presets"]:
        names = ", ".join(sorted([*_PAPER["presets"], "ranks", "sensitivity"]))
        raise ValueError(f"there is no preset '{name}'; there are: {names}")
    data = {"none"} | (_data_of(compose_run(pools)) if with_data else set())
    rows = [
        method
        for method in _PAPER["presets"][name]
        if NEED_DATA.get(method.split(":")[0], "none") in data
    ]
    if name == "paper":
        rows = _rows_of_paper(rows, modelpool)
    return [replace(spec, preset=True) for spec in parse_methods(",".join(rows), overrides)]


def _rows_of_paper(methods: Sequence[str], modelpool: str) -> list[str]:
    """Return the methods that the paper shows for a model pool, with its settings, in each of their
    forms.
    """
    # These tables have fewer methods than the main one.
    shown = printed("flan_t5", modelpool) or printed("llava", modelpool) or methods
    forms = _PAPER["other_form"] | (
        {"task_arithmetic": "released"} if modelpool == _FLAN_T5 else {}
    )
    rows = []
    for method in (method for method in methods if method in shown):
        settings = paper_settings(modelpool, method)
        rows.append(":".join([f"{method}={method}", *settings]))
        if form := forms.get(method):
            rows.append(":".join([f"{method} ({form})={method}", f"form={form}", *settings]))
    return rows


def _data_of(config: DictConfig) -> set[str]:
    """Return which data of :data:`NEED_DATA` the pools have: unlabelled (CLIP, Flan-T5) or training
    data (CLIP).
    """
    taskpool, train = taskpool_config(config), config.modelpool.get("train_datasets") or {}
    kind = str(taskpool.get("_target_") or taskpool.get("type")).rpartition(".")[2]
    trained = kind == "CLIPVisionModelTaskPool" and {*config.modelpool.models} - {PRETRAINED} <= {
        *train
    }
    unlabelled = kind in ("CLIPVisionModelTaskPool", "FlanT5GLUETextGenerationTaskPool")
    return {name for name, has in {"training": trained, "unlabelled": unlabelled}.items() if has}


def with_fitting_ranks(spec: RunSpec, experiment: Experiment, overrides: Sequence[str]) -> RunSpec:
    """Return a method of a preset with ranks for the models' width, except those that the overrides
    give.
    """
    if not (spec.preset and spec.method.startswith("nufilt")):
        return spec
    config, given = compose_run(spec.overrides).method, {key_of(word) for word in overrides}
    ranks = {
        key: rank_for_width(key, config[key], experiment.width)
        for key in ("null_rank", "lora_rank")
    }
    changed = [
        f"{key}={rank}"
        for key, rank in ranks.items()
        if rank != config[key] and f"method.{key}" not in given
    ]
    overrides = (*spec.overrides, *(f"method.{setting}" for setting in changed))
    return replace(spec, overrides=overrides, settings=(*spec.settings, *changed))


def printed_row(
    spec: RunSpec, form: str | None, modelpool: str, numbers: Mapping[str, Published]
) -> Published:
    """Return the printed numbers for a method if it is run with the paper's settings.

    They stand beside either form, unless it is known which was printed. A ``released`` form needs
    no note about it.
    """
    if _PAPER["printed_form"].get(spec.method, form) != form:
        return {}
    given = tuple(
        setting
        for setting in spec.settings
        if not setting.startswith("form=") and not _is_harmless(f"method.{setting}")
    )
    as_printed = given == paper_settings(modelpool, spec.method)
    row = numbers.get(spec.method if as_printed else ":".join((spec.method, *given)), {})
    about_it = {
        key
        for key, number in row.items()
        if form == "released" and "form=released" in number["note"]
    }
    return row | {key: {**row[key], "note": ""} for key in about_it}


def panel_specs(panel: Mapping[str, Any], width: int) -> list[RunSpec]:
    """Return the methods of a panel of :data:`SENSITIVITY`, with ranks for the width."""
    specs = []
    for value in panel["values"]:
        options = {**panel["fixed"], panel["key"]: value}
        fitting = {key: rank_for_width(key, number, width) for key, number in options.items()}
        settings = tuple(f"{key}={number}" for key, number in fitting.items())
        overrides = ("method=nufilt", *(f"method.{setting}" for setting in settings))
        specs.append(
            RunSpec(f"{panel['symbol']} {fitting[panel['key']]}", overrides, "nufilt", settings)
        )
    return list(dict.fromkeys(specs))  # several ranks may be one in a narrow model


def rank_for_width(key: str, value: int, width: int) -> int:
    """Return an option, ``value`` in the paper at width 768, for models whose narrowest layer has
    d_i = ``width``.

    Below 768, r_p and r_l are in proportion to the width, rounded down; no rank is above it.
    """
    if key in ("null_rank", "lora_rank") and value:
        return width if value == _WIDTH else max(1, value * min(width, _WIDTH) // _WIDTH)
    return min(value, width) if key == "task_rank" else value
