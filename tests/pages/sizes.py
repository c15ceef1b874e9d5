"""Comparisons of any number of methods and tasks, with made-up numbers."""

import json
from dataclasses import replace

import pandas as pd

from fusion_bench_nufilt.compare.presets import SENSITIVITY, panel_specs
from fusion_bench_nufilt.compare.specs import RunSpec
from fusion_bench_nufilt.compare.summary import compare_runs
from fusion_bench_nufilt.continual import AccuracyMatrix, task_order
from fusion_bench_nufilt.pages.content import Method, SeedRun
from tests.pages.helpers import LAYERS


def names(kind, count):
    return [f"{kind} {number}" for number in range(1, count + 1)]


def run_of(tasks, seed, level, config=None, evaluate="every_step"):
    """A run whose scores begin at ``level`` and fall by two points at every later step."""
    order = task_order(tasks, shuffle=True, seed=seed)
    matrix = AccuracyMatrix(order)
    for step in range(1, len(order) + 1):
        for place, task in enumerate(order[:step]):
            if evaluate == "every_step" or step == len(order):
                matrix.record(step, {task: level - 0.02 * (step - 1 - place) + 0.001 * seed})
    config = {**(config or {}), "seed": seed}
    return SeedRun(config, order, matrix.rows(), [0.5] * len(order), environment={"device": "cpu"})


def comparison_of(methods, tasks, seeds=(42, 43), evaluate="every_step", preset=None):
    tasks = names("task", tasks)
    runs = {}
    for number, label in enumerate(names("method", methods)):
        spec = RunSpec(label, (f"method={label}",), label, ())
        runs[spec] = {
            seed: run_of(tasks, seed, 0.9 - 0.03 * number, evaluate=evaluate) for seed in seeds
        }
    references = {"pretrained": dict.fromkeys(tasks, 0.3), "individual": dict.fromkeys(tasks, 0.95)}
    settings = {
        "modelpool": "some_pool",
        "overrides": [],
        "evaluate": evaluate,
        "resolved": {"scored": "all test data"},
    }
    return compare_runs(settings, tasks, list(seeds), references, runs, preset)


def sensitivity_of(tasks, evaluate="every_step", preset="sensitivity"):
    """The panels of the paper's sensitivity figure."""
    result = comparison_of(1, tasks, evaluate=evaluate, preset=preset)
    usual = {"null_rank": 0.1667, "lora_rank": 0.0833, "task_rank": 8, "max_steps": 50}
    methods = {}
    for panel in SENSITIVITY:
        for number, spec in enumerate(panel_specs(panel)):
            changed = dict(setting.split("=") for setting in spec.settings)
            config = usual | {key: json.loads(value) for key, value in changed.items()}
            runs = {
                seed: run_of(result.tasks, seed, 0.7 + 0.01 * number, config, evaluate)
                for seed in result.seeds
            }
            methods[spec.label] = Method(list(spec.overrides), runs)
    return replace(result, methods=methods)


def layers_of(tasks):
    """The rows of a run's ``layers.csv``."""
    rows = []
    for step, task in enumerate(names("task", tasks), 1):
        for number, layer in enumerate(LAYERS):
            row = {"step": step, "task": task, "layer": layer, "filtered_share": 0.01 * step}
            rows.append(row | {"overlap": 0.1 * number, "task_norm": 5.0, "loss_after": 1.5 * step})
    return pd.DataFrame(rows)
