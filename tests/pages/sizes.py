"""Comparisons of any number of methods and tasks, with made-up numbers."""

import json
from dataclasses import replace

import pandas as pd

from fusion_bench_nufilt.compare.presets import SENSITIVITY, panel_specs
from fusion_bench_nufilt.pages.content import Method
from tests.compare.helpers import comparison, finished
from tests.pages.helpers import LAYERS


def names(kind, count):
    return [f"{kind} {number}" for number in range(1, count + 1)]


def run_of(tasks, seed, level, config=None, evaluate="every_step"):
    """A run whose scores begin at ``level`` and fall by two points at every later step."""
    scores = dict.fromkeys(tasks, level + 0.001 * seed)
    run = finished(seed, -0.02, scores, config or {})
    if evaluate == "every_step":
        return run
    *steps, last = run.matrix.rows()
    return replace(run, accuracy_matrix=[[None] * len(tasks) for _ in steps] + [last])


def comparison_of(methods, tasks, seeds=(42, 43), evaluate="every_step", preset=None):
    tasks = names("task", tasks)
    runs = {}
    for number, label in enumerate(names("method", methods)):
        level = 0.9 - 0.03 * number
        runs[label] = [run_of(tasks, seed, level, evaluate=evaluate) for seed in seeds]
    return comparison(runs, evaluate=evaluate, preset=preset, tasks=tasks)


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
