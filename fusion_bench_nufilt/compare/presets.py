"""The comparisons of the paper (Qiu et al., ICLR 2026, arXiv 2509.21413), whose methods and
settings ``presets.yaml`` has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from fusion_bench_nufilt.continual.models import PRETRAINED
from fusion_bench_nufilt.utils.overrides import key_of, without_method

from .configs import compose_run, taskpool_config
from .specs import NEED_DATA, RunSpec, parse_methods

_PAPER = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text())
#: The panels of the paper's sensitivity figure.
SENSITIVITY = _PAPER["sensitivity"]
#: The baselines of the paper's main table that need no data.
DATA_FREE = [
    method for method in _PAPER["presets"]["paper"] if method not in {*NEED_DATA, "nufilt"}
]

_FLAN_T5 = "flan-t5-base_glue"


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
    ``with_data``, and where the pool has that data.
    """
    if with_data and name not in ("paper", "overhead"):
        raise ValueError(
            f"--with-data goes with --preset paper or overhead: no method of '{name}' needs data"
        )
    if name in ("sensitivity", "ranks"):
        specs = []
        for panel in SENSITIVITY:
            if name == "sensitivity" or panel["key"] != "max_steps":
                specs += panel_specs(panel)
        return specs
    if name not in _PAPER["presets"]:
        names = ", ".join(sorted([*_PAPER["presets"], "ranks", "sensitivity"]))
        raise ValueError(f"there is no preset '{name}'; there are: {names}")
    data = {"none"}
    if with_data:
        data |= _data_of(compose_run(without_method([f"modelpool={modelpool}", *overrides])))
    overridden_keys = {key_of(word) for word in overrides}
    methods = []
    for words in _PAPER["presets"][name]:
        method, *settings = words.split(":")
        # What the user says for all methods would be lost otherwise.
        own = [word for word in settings if f"method.{key_of(word)}" not in overridden_keys]
        if NEED_DATA.get(method, "none") in data:
            methods.append(":".join([method, *own]))
    if name == "paper":
        methods = _methods_of_paper(methods, modelpool)
    specs = []
    for spec in parse_methods(",".join(methods), overrides):
        settings = paper_settings(modelpool, spec.method) if name == "paper" else ()
        specs.append(replace(spec, label=":".join([spec.label, *settings])))
    return specs


def _methods_of_paper(methods: Sequence[str], modelpool: str) -> list[str]:
    """Return the methods that the paper shows for a model pool, with its settings, by both rules
    where there are two.
    """
    if modelpool in _PAPER["fewer_methods"]:
        methods = [method for method in methods if method in _PAPER["fewer_methods"][modelpool]]
    other_rules = dict(_PAPER["other_rule"])
    if modelpool == _FLAN_T5:
        other_rules["task_arithmetic"] = ("released", "restart")
    words = []
    for method in methods:
        settings = paper_settings(modelpool, method)
        words.append(":".join([f"{method}={method}", *settings]))
        if method in other_rules:
            source, rule = other_rules[method]
            words.append(":".join([f"{method} ({source})={method}", f"rule={rule}", *settings]))
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


def panel_specs(panel: Mapping[str, Any]) -> list[RunSpec]:
    """Return the methods of a panel of :data:`SENSITIVITY`; the option that the panel varies is the
    last that they set.
    """
    specs = []
    for value in panel["values"]:
        options = {**panel["fixed"], panel["key"]: value}
        settings = tuple(f"{option}={number}" for option, number in options.items())
        overrides = ("method=nufilt", *(f"method.{setting}" for setting in settings))
        label = ":".join([f"{panel['symbol']} {value}", *settings[:-1]])
        specs.append(RunSpec(label, overrides, "nufilt", settings))
    return specs
