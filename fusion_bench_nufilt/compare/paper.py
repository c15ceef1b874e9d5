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
from fusion_bench_nufilt.methods.options import DeviceConfig, ProtocolConfig
from fusion_bench_nufilt.pages.content import SINGLE_MODELS, Published
from fusion_bench_nufilt.pages.results import rows_with
from fusion_bench_nufilt.utils.options import with_scope
from fusion_bench_nufilt.utils.overrides import key_of, without_method

from .configs import compose_run, quiet, taskpool_config
from .experiment import Experiment
from .specs import NEED_DATA, RunSpec, parse_methods

_PAPER = yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text())
_WIDTH = 768  # of the models that its ranks are for
#: The panels of the paper's sensitivity figure.
SENSITIVITY = _PAPER["sensitivity"]
#: The baselines of the paper's main table that need no data.
DATA_FREE = [
    method for method in _PAPER["presets"]["paper"] if method not in {*NEED_DATA, "nufilt"}
]

_FLAN_T5 = "flan-t5-base_glue"
_LLAVA = "llava-1.5-7b"
#: The one order of the paper's Flan-T5, the alphabetical one.
_IN_ORDER = "method.shuffle_order=false"
#: Further keys that change no score: what is measured of a run, and where it is run.
_HARMLESS = {
    "fabric.accelerator",
    "fabric.devices",
    "hydra.searchpath",
    "method.evaluate",
    *(f"method.{name}" for name in with_scope([ProtocolConfig, DeviceConfig], "run")),
}
#: These tables have the metrics of a comparison; seconds depend on the machine. Where two have the
#: same number, the later one counts.
_COMPARABLE = ["main", "single", "tasks", "ablation", "flan_t5", "steps"]


@cache
def printed_numbers() -> pd.DataFrame:
    """Return every number that the paper prints as it prints it, one in each row, and what it
    belongs to: the columns are those of the long table, and ``table``.
    """
    tables = []
    for file in sorted(Path(__file__).with_name("published").glob("*.csv")):
        # As text, since a cell may be "75.7 ± 0.3", and an empty one is no number.
        wide = pd.read_csv(file, dtype=str, keep_default_na=False)
        # A column is a model pool or a metric, whichever a row does not name.
        across = "metric" if "modelpool" in wide else "modelpool"
        keys = [name for name in ("modelpool", "metric", "method", "note") if name in wide]
        long = wide.melt(keys, var_name=across, value_name="printed")
        long["table"] = file.stem
        tables.append(long[long["printed"] != ""])
    rows = pd.concat(tables, ignore_index=True).fillna({"note": ""})
    numbers = rows.pop("printed").str.split(" ± ", expand=True).astype(float)
    return rows.assign(value=numbers[0], deviation=numbers[1])


def as_published(numbers: pd.DataFrame) -> Published:
    """Return a method's printed numbers by metric or task, as ``results.json`` holds them."""
    published: Published = {}
    for row in numbers.to_dict("records"):
        deviation = None if pd.isna(row["deviation"]) else row["deviation"]
        number = {"value": row["value"], "deviation": deviation, "note": row["note"]}
        published[row["metric"]] = number
    return published


def published(
    modelpool: str,
    overrides: Sequence[str],
    seeds: Sequence[int],
    validation: bool | None = None,
) -> tuple[pd.DataFrame, str]:
    """Return the rows of :func:`printed_numbers` for a comparison, and why others that the paper
    prints for the model pool are not among them.
    """
    numbers = rows_with(printed_numbers(), modelpool=modelpool)
    if modelpool == _LLAVA:  # each has the note that the paper does not print its setting
        return numbers, ""
    numbers = rows_with(numbers, table=_COMPARABLE)
    numbers = numbers.sort_values("table", key=lambda names: names.map(_COMPARABLE.index))
    numbers = numbers.drop_duplicates(["method", "metric"], keep="last")
    if numbers.empty:
        return numbers, ""
    none = numbers.iloc[:0]
    changing = [override for override in overrides if not _is_harmless(override)]
    other_settings = [override for override in changing if override != _IN_ORDER]
    if modelpool == _FLAN_T5 and _IN_ORDER not in changing:
        return none, _hidden(f"are for one order, which {_IN_ORDER} takes")
    if other_settings:
        return none, _hidden(f"are for another setting than {other_settings[0]}")
    if modelpool != _FLAN_T5 and changing:
        return none, _hidden(f"are for other orders than {_IN_ORDER}")
    if validation is not None:
        return none, _hidden("are for all test data")
    if modelpool != _FLAN_T5 and sorted(seeds) != _PAPER["seeds"]:
        # The single models do not depend on the order.
        note = _hidden("of merged models are means over ten orders, those of --seeds 42:52")
        return rows_with(numbers, method=list(SINGLE_MODELS)), note
    return numbers, ""


def _hidden(reason: str) -> str:
    return f"the paper's numbers {reason}, and are not shown"


def _is_harmless(override: str) -> bool:
    """Tell whether an override changes no score: where and with how many processes it is run."""
    key = key_of(override)
    return key in _HARMLESS or key.split(".")[-1] in ("num_workers", "pin_memory")


def paper_settings(modelpool: str, method: str) -> tuple[str, ...]:
    """Return the settings in which the paper differs from our configs on a model pool."""
    if not modelpool.endswith(("TALL14", "TALL20")):
        return ()
    return tuple(_PAPER["many_tasks"].get(method, ()))


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
            experiment = Experiment(compose_run(pools))
            experiment.evaluator  # noqa: B018 -- before any model is loaded
            width = experiment.width
        specs = []
        for panel in SENSITIVITY:
            if name == "sensitivity" or panel["key"] != "max_steps":
                specs += panel_specs(panel, width)
        return specs
    if name not in _PAPER["presets"]:
        names = ", ".join(sorted([*_PAPER["presets"], "ranks", "sensitivity"]))
        raise ValueError(f"there is no preset '{name}'; there are: {names}")
    data = {"none"}
    if with_data:
        data |= _data_of(compose_run(pools))
    methods = []
    for method in _PAPER["presets"][name]:
        if NEED_DATA.get(method.split(":")[0], "none") in data:
            methods.append(method)
    if name == "paper":
        methods = _methods_of_paper(methods, modelpool)
    specs = []
    for spec in parse_methods(",".join(methods), overrides):
        settings = paper_settings(modelpool, spec.method) if name == "paper" else ()
        specs.append(replace(spec, label=":".join([spec.label, *settings]), preset=True))
    return specs


def _methods_of_paper(methods: Sequence[str], modelpool: str) -> list[str]:
    """Return the methods that the paper shows for a model pool, with its settings, in each of their
    forms.
    """
    # These tables have fewer methods than the main one.
    shorter = rows_with(printed_numbers(), modelpool=modelpool, table=["flan_t5", "llava"])
    if len(shorter):
        methods = [method for method in methods if method in set(shorter["method"])]
    forms = dict(_PAPER["other_form"])
    if modelpool == _FLAN_T5:
        forms["task_arithmetic"] = "released"
    words = []
    for method in methods:
        settings = paper_settings(modelpool, method)
        words.append(":".join([f"{method}={method}", *settings]))
        if method in forms:
            form = forms[method]
            words.append(":".join([f"{method} ({form})={method}", f"form={form}", *settings]))
    return words


def _data_of(config: DictConfig) -> set[str]:
    """Return which data of :data:`NEED_DATA` the pools have: unlabelled (CLIP, Flan-T5) or training
    data (CLIP).
    """
    taskpool = taskpool_config(config)
    kind = str(taskpool.get("_target_") or taskpool.get("type")).rpartition(".")[2]
    data = set()
    if kind in ("CLIPVisionModelTaskPool", "FlanT5GLUETextGenerationTaskPool"):
        data.add("unlabelled")
    tasks = {*config.modelpool.models} - {PRETRAINED}
    train_datasets = config.modelpool.get("train_datasets") or {}
    if kind == "CLIPVisionModelTaskPool" and tasks <= {*train_datasets}:
        data.add("training")
    return data


def with_fitting_ranks(spec: RunSpec, experiment: Experiment, overrides: Sequence[str]) -> RunSpec:
    """Return a method of a preset with ranks for the models' width, except those that the overrides
    give.
    """
    if not (spec.preset and spec.method.startswith("nufilt")):
        return spec
    config = compose_run(spec.overrides).method
    overridden_keys = {key_of(word) for word in overrides}
    changed = []
    for key in ("null_rank", "lora_rank"):
        rank = rank_for_width(key, config[key], experiment.width)
        if rank != config[key] and f"method.{key}" not in overridden_keys:
            changed.append(f"{key}={rank}")
    overrides = (*spec.overrides, *(f"method.{setting}" for setting in changed))
    # The label says what was derived, as one would type it: without it, the row is another one.
    label = ":".join([spec.label, *changed])
    return replace(spec, label=label, overrides=overrides, settings=(*spec.settings, *changed))


def printed_for_method(
    spec: RunSpec, form: str | None, modelpool: str, numbers: pd.DataFrame
) -> pd.DataFrame:
    """Return the printed numbers for a method if it is run with the paper's settings.

    They stand beside either form, unless it is known which was printed. A ``released`` form needs
    no note about it.
    """
    none = numbers.iloc[:0]
    if _PAPER["printed_form"].get(spec.method, form) != form:
        return none
    settings = []
    for setting in spec.settings:
        if not setting.startswith("form=") and not _is_harmless(f"method.{setting}"):
            settings.append(setting)
    # The paper names what it varies, such as ``nufilt:max_steps=25``.
    method = ":".join([spec.method, *settings])
    if tuple(settings) == paper_settings(modelpool, spec.method):
        method = spec.method
    rows = rows_with(numbers, method=method).copy()
    if form == "released":
        rows.loc[rows["note"].str.contains("form=released"), "note"] = ""
    for note in _notes_on_settings(spec, modelpool):
        rows["note"] = (rows["note"] + "; " + note).str.removeprefix("; ")
    return rows


def _notes_on_settings(spec: RunSpec, modelpool: str) -> list[str]:
    """Return in what our run of a method is not known to be the one that the paper prints."""
    notes = []
    if NEED_DATA.get(spec.method) == "unlabelled":
        notes.append(_PAPER["notes"]["unlabelled"])
    if paper_settings(modelpool, spec.method) and spec.method in _PAPER["notes"]:
        notes.append(_PAPER["notes"][spec.method])
    return notes


def panel_specs(panel: Mapping[str, Any], width: int) -> list[RunSpec]:
    """Return the methods of a panel of :data:`SENSITIVITY`, with ranks for the width; the option
    that the panel varies is the last that they set.
    """
    key = panel["key"]
    specs = []
    for value in panel["values"]:
        options = {}
        for option, number in {**panel["fixed"], key: value}.items():
            options[option] = rank_for_width(option, number, width)
        settings = tuple(f"{option}={number}" for option, number in options.items())
        overrides = ("method=nufilt", *(f"method.{setting}" for setting in settings))
        label = ":".join([f"{panel['symbol']} {options[key]}", *settings[:-1]])
        specs.append(RunSpec(label, overrides, "nufilt", settings))
    return list(dict.fromkeys(specs))  # several ranks may be one in a narrow model


def rank_for_width(key: str, value: int, width: int) -> int:
    """Return an option, ``value`` in the paper at width 768, for models whose narrowest layer has
    d_i = ``width``.

    Below 768, r_p and r_l are in proportion to the width, rounded down; no rank is above it.
    """
    if key == "task_rank":
        return min(value, width)
    if key not in ("null_rank", "lora_rank") or value == 0:
        return value
    if value == _WIDTH:  # all directions
        return width
    # Rank 0 would leave the filter or the adapter out.
    return max(1, value * min(width, _WIDTH) // _WIDTH)
