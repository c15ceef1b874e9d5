"""`make demo`: the eight models of the demo merged by NUFILT and by FusionBench's own continual methods."""

import argparse
import contextlib
import io
import json
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fusion_bench.constants
import numpy as np
from fusion_bench.utils import instantiate
from fusion_bench.utils.instantiate_utils import set_print_function_call
from hydra import compose, initialize_config_dir
from lightning import Fabric
from matplotlib.figure import Figure
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

from fusion_bench_nufilt.continual import AccuracyMatrix, Evaluator
from fusion_bench_nufilt.continual.checkpoint import atomic_file, write_text
from fusion_bench_nufilt.continual.evaluation import score
from fusion_bench_nufilt.demo import demo_folder

# Ranks scaled to the width as the paper's 128 and 64 are to the 768 of CLIP ViT-B; at width 128 its own filter all.
SCALED = ["method.null_rank=21", "method.lora_rank=10"]
METHODS = {
    "NUFILT (ranks 21/10/8)": ["method=nufilt", *SCALED],
    "NUFILT all-linear (21/10/8)": ["method=nufilt/all_linear", *SCALED],
    "NUFILT (paper's ranks 128/64/8)": ["method=nufilt"],
    "OPCM": ["method=continual/opcm"],
    "task arithmetic": ["method=continual/task_arithmetic"],
    "weight averaging": ["method=continual/weight_average"],
}


def compose_run(overrides: list[str]) -> DictConfig:
    """What `fusion_bench` composes from these overrides."""
    folder = Path(fusion_bench.constants.PROJECT_ROOT_PATH) / "fusion_bench_config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("fabric_model_fusion", overrides)


def run_method(
    config: DictConfig, modelpool: Any, evaluator: Evaluator, fabric: Fabric
) -> tuple[AccuracyMatrix, float]:
    """Merge the stream with one method; returns its scores after every step and the seconds that merging took."""
    algorithm = instantiate(config)
    algorithm._fabric_instance = fabric
    algorithm.evaluate = "every_step"
    algorithm.run(modelpool, evaluator)
    return algorithm.matrix, sum(algorithm.merge_seconds)


def score_references(modelpool: Any, evaluator: Evaluator) -> dict[str, float]:
    """Mean scores of the pretrained model and of each task's own fine-tuned model."""
    tasks = modelpool.model_names
    zero_shot = evaluator.report(modelpool.load_pretrained_model(), tasks)
    own = [evaluator.report(modelpool.load_model(name), [name])[name] for name in tasks]
    return {
        "pretrained": sum(score(zero_shot[task]) for task in tasks) / len(tasks),
        "individual": sum(score(result) for result in own) / len(tasks),
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def print_results(results: dict[str, tuple[AccuracyMatrix, float]], references: dict[str, float], seed: int) -> None:
    table = Table(title=f"Eight models merged one after another (seed {seed})")
    table.add_column("method")
    for column in ("ACC %", "BWT %", "seconds"):
        table.add_column(column, justify="right")
    for label, acc in references.items():
        table.add_row(label, f"{100 * acc:.1f}", "", "", style="dim")
    best = max(matrix.acc for matrix, _ in results.values())
    for label, (matrix, seconds) in results.items():
        row = (label, f"{100 * matrix.acc:.1f}", f"{100 * matrix.bwt:+.1f}", f"{seconds:.1f}")
        table.add_row(*row, style="bold" if matrix.acc == best else "")
    Console().print(table)


def plot_results(results: dict[str, tuple[AccuracyMatrix, float]], references: dict[str, float]) -> Figure:
    """Mean score over the tasks seen so far, after each step."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for label, (matrix, _) in results.items():
        steps = range(1, len(matrix.tasks) + 1)
        axes.plot(steps, 100 * np.nanmean(matrix.values, axis=1), marker="o", label=label)
        axes.set_xticks(steps, [f"{step}\n+ {task}" for step, task in zip(steps, matrix.tasks, strict=True)])
    for (label, acc), style in zip(references.items(), (":", "--"), strict=True):
        axes.axhline(100 * acc, color="grey", linestyle=style, label=f"{label} (all eight tasks)")
    axes.set_xlabel("models merged")
    axes.set_ylabel("mean accuracy on the tasks seen so far (%)")
    axes.legend(fontsize=8, loc="lower left")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fusion_bench_nufilt.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/demo"), help="folder for the table and the picture")
    parser.add_argument("--seed", type=int, default=42, help="seed of the task order")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for chatty in ("fusion_bench", "lightning.fabric.utilities.seed"):
        logging.getLogger(chatty).setLevel(logging.ERROR)

    begin = time.perf_counter()
    demo_folder()  # made on first use, with a progress bar of its own
    pools = compose_run(["modelpool=nufilt_demo", "taskpool=nufilt_demo"])
    fabric = Fabric(devices=1, accelerator="cpu")
    results: dict[str, tuple[AccuracyMatrix, float]] = {}
    bar = tqdm(total=1 + len(METHODS), desc="Scoring the single models", unit="run", disable=None)
    # FusionBench prints a progress bar for every data set and a summary for every run: one bar is enough here.
    with set_print_function_call(False), quiet(), bar:
        modelpool, taskpool = instantiate(pools.modelpool), instantiate(pools.taskpool)
        taskpool._fabric_instance = fabric
        evaluator = Evaluator(taskpool)
        references = score_references(modelpool, evaluator)
        for label, overrides in METHODS.items():
            bar.set_description(f"Merging with {label}")
            bar.update()
            config = compose_run([*overrides, f"method.seed={arguments.seed}"])
            results[label] = run_method(config.method, modelpool, evaluator, fabric)
        bar.update()

    print_results(results, references, arguments.seed)
    with atomic_file(arguments.out / "accuracy_per_step.png") as file:
        plot_results(results, references).savefig(file, dpi=150, format="png")
    write_text(arguments.out / "results.json", json.dumps(_as_json(results, references, arguments.seed), indent=2))
    print(f"accuracy_per_step.png and results.json are in {arguments.out}; {time.perf_counter() - begin:.0f} s in all")


def _as_json(results: dict[str, tuple[AccuracyMatrix, float]], references: dict[str, float], seed: int) -> Any:
    def fraction(value: float) -> float | None:
        return None if math.isnan(value) else value

    return {
        "seed": seed,
        **references,
        "methods": {
            label: {
                "overrides": METHODS[label],
                "ACC": fraction(matrix.acc),
                "BWT": fraction(matrix.bwt),
                "seconds": seconds,
                "tasks": matrix.tasks,
                "accuracy_matrix": [[fraction(value) for value in row] for row in matrix.values.tolist()],
            }
            for label, (matrix, seconds) in results.items()
        },
    }


if __name__ == "__main__":
    main()
