"""Comparisons with made-up scores."""

from fusion_bench_nufilt.compare.specs import RunSpec
from fusion_bench_nufilt.compare.summary import compare_runs
from fusion_bench_nufilt.continual import AccuracyMatrix, task_order
from fusion_bench_nufilt.pages.content import SeedRun
from fusion_bench_nufilt.pages.results import means

TASKS = ["a", "b", "c"]
SCORES = {"a": 0.9, "b": 0.6, "c": 0.3}
CONFIG = {"null_rank": 8, "lora_rank": 4, "task_rank": 2, "max_steps": 6}
ENVIRONMENT = {"torch": "2.13.0", "device": "cpu"}


def finished(seed, change=0.0, scores=SCORES, config=CONFIG, **fields):
    """A run in which each task's score changes by ``change`` at every step after its own."""
    matrix = AccuracyMatrix(task_order(list(scores), shuffle=True, seed=seed))
    for step in range(1, len(scores) + 1):
        of_step = {}
        for i, task in enumerate(matrix.tasks[:step]):
            of_step[task] = scores[task] + change * (step - 1 - i)
        matrix.record(step, of_step)
    fields = {"environment": ENVIRONMENT} | fields
    return SeedRun({**config, "seed": seed}, matrix.tasks, matrix.rows(), [1.0, 2.0], **fields)


def failed(seed, reason="ValueError: no"):
    return SeedRun({"seed": seed}, environment=ENVIRONMENT, error=reason)


def comparison(
    runs,
    modelpool="some_pool",
    overrides=(),
    evaluate="every_step",
    preset=None,
    settings=(),
    tasks=TASKS,
):
    """From ``{label: runs}``."""
    by_seed = {}
    for label, of_label in runs.items():
        spec = RunSpec(label, (f"method={label}",), label, settings)
        by_seed[spec] = {run.config["seed"]: run for run in of_label}
    about = {
        "modelpool": modelpool,
        "overrides": list(overrides),
        "evaluate": evaluate,
        "resolved": {"scored": "all test data"},
    }
    references = {
        "pretrained": dict.fromkeys(tasks, 0.25),
        "individual": dict.fromkeys(tasks, 0.95),
    }
    return compare_runs(
        about, tasks, list(next(iter(by_seed.values()))), references, by_seed, preset
    )


def mean_of(result, label, metric):
    """The mean of a metric over a method's seeds."""
    return means(result.table, "metric", [label], [metric]).loc[label, metric]


def final(result, label, task):
    """The mean score of a task after the last step."""
    return means(result.last_scores, "task", [label], [task]).loc[label, task]
