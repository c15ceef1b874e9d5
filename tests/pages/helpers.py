"""Small folders of each kind, with made-up numbers."""

import csv
import json
from itertools import product

import numpy as np
import torch

from fusion_bench_nufilt.analysis.summary import Analysis, save_analysis
from fusion_bench_nufilt.continual import AccuracyMatrix
from fusion_bench_nufilt.utils.files import write_json, write_text
from tests.analysis.helpers import loss_row, pair_rows
from tests.compare.helpers import comparison, finished

TASKS = ["digits", "letters", '</ScRiPt ><svg onload="document.title=1">']
PARTS = ("self_attn.q_proj", "mlp.fc1")
LAYERS = [f"encoder.layers.{block}.{part}" for block, part in product((0, 1), PARTS)]


def run_folder(folder):
    """A run of three models, one of which has no score."""
    folder.mkdir(exist_ok=True)
    matrix = AccuracyMatrix(TASKS)
    matrix.record(1, {"digits": 0.9})
    matrix.record(2, {"digits": 0.8, "letters": 0.7})
    matrix.record(3, {"digits": 0.75, "letters": 0.65})
    about = {
        "method": "NUFILT",
        "config": {"null_rank": 8},
        "models": {},
        "merge_seconds": [0.1, 0.2, 0.3],
        "scored": "all test data",
    }
    matrix.save(folder, {**about, "versions": {"torch": "2.13.0"}})
    layers_table(folder)
    return folder


def layers_table(folder):
    with (folder / "layers.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        columns = ["step", "task", "layer", "task_norm", "filtered_share", "overlap", "loss_after"]
        writer.writerow(columns)
        for step, task in enumerate(TASKS, 1):
            for layer in LAYERS:
                writer.writerow([step, task, layer, 2.0, 0.1 * step, 0.2, 1.5 * step])


def comparison_folder(folder):
    """Two methods on two orders."""
    folder.mkdir(exist_ok=True)
    runs = {
        "NUFILT": [finished(seed, -0.1) for seed in (42, 43)],
        "sum": [finished(seed, -0.2) for seed in (42, 43)],
    }
    write_json(folder / "results.json", comparison(runs).as_json())
    return folder


def analysis_of(methods, tasks):
    """Task vectors in four layers, and the losses of methods."""
    rng = np.random.default_rng(0)
    shape = (len(LAYERS), len(tasks), len(tasks))
    vector = {"norm": 1.0, "relative_norm": 0.1, "rank": 12, "rank_90": 9, "energy_in_top": 0.6}
    vector["energy"] = torch.full((32,), 1 / 32, dtype=torch.float64)
    vectors = []
    for task, layer in product(tasks, LAYERS):
        effective_rank = float(rng.uniform(2, 9))
        vectors.append({"task": task, "layer": layer, **vector, "effective_rank": effective_rank})
    losses = []
    for method, (step, task), layer in product(methods, enumerate(tasks, 1), LAYERS):
        losses.append(loss_row(method, step, task, layer, *rng.uniform(1, 2, 6).tolist()))
    affinity = rng.uniform(0.1, 0.4, shape) + 0.37 * np.eye(len(tasks))
    overlap = rng.uniform(0.2, 0.57, shape)
    by_rank = rng.uniform(0, 1, (*shape, 5))
    return Analysis(
        about={"modelpool": "some_pool", "scored": "all test data"},
        tasks=list(tasks),
        layers=dict.fromkeys(LAYERS, (16, 16)),
        task_rank=4,
        vectors=vectors,
        overlaps=pair_rows(LAYERS, tasks, ("vector", "other_vector", "overlap"), overlap),
        affinity=pair_rows(LAYERS, tasks, ("data", "vector", "affinity"), affinity, by_rank),
        losses=losses,
        scores={method: {"ACC": 0.7, "BWT": -0.1} for method in methods},
    )


def analysis_folder(folder):
    """What `nufilt analyze` leaves of it, but for the pictures."""
    save_analysis(analysis_of(["NUFILT", "sum"], TASKS), folder)
    return folder


def merge_folder(folder):
    """What a merge of two models into one that holds another says of itself; the last changes half
    of the layers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    norms = {layer: float(number) for number, layer in enumerate(LAYERS, 1)}
    report = {
        "shape": [8, 16],
        "filtered_share": 0.25,
        "overlap": 0.125,
        "loss_before": 2.0,
        "loss_after": 1.5,
    }
    layers = {layer: [{"step": 2, "task_norm": norm, **report}] for layer, norm in norms.items()}
    for layer in LAYERS[::2]:
        layers[layer].append({"step": 3, "task_norm": 4 * norms[layer], **report})
    fates = {"merged": (4, 0.75), "averaged": (0, 0.0), "kept": (6, 0.25)}
    coverage = {
        fate: {"parameters": count, "share": share} for fate, (count, share) in fates.items()
    }
    about = {
        "method": "NUFILT",
        "step": 3,
        "tasks": TASKS,
        "inputs": {},
        "settings": {"null_rank": 8},
        "versions": {},
    }
    told = {
        "coverage": {**coverage, "left_out": {"layers.*.mlp.fc2": 2}},
        "warnings": ["<i>twice</i>"],
    }
    write_text(folder / "nufilt.json", json.dumps({**about, **told, "layers": layers}))
    return folder


FOLDERS = {
    "run": run_folder,
    "comparison": comparison_folder,
    "analysis": analysis_folder,
    "merge": merge_folder,
}
