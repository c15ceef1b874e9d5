"""Measure how strong a merged update should be (docs/notes/strength.md).

    python benchmarks/strength.py --out STRENGTH.json DEV:demo_adamw DEV:demo_muon
    DEV:demo_adamw+demo_muon:4 ...

A benchmark is FOLDER:POOL, where FOLDER/config has the pool, as `tunings.py` and `llm_judge.py`
leave it. Several pools joined by a plus sign deal their tasks in turn, and a number at the end
keeps so many tasks. Each method merges the tasks once; its update of all merged layers is then
multiplied by powers of the square root of 2, and every model is scored. Scores are kept in the
file, so that an interrupted run goes on. With --judge, only `best` is multiplied; the other methods
are scored at their settings, NUFILT in as many orders as --orders says (seeds from 42).
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn

from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.compare.configs import compose_run, quiet
from fusion_bench_nufilt.compare.experiment import Experiment
from fusion_bench_nufilt.layers import select_layers
from fusion_bench_nufilt.stream.evaluation import score
from fusion_bench_nufilt.stream.models import PRETRAINED, load_model

METHODS = {
    "best": {},
    "tsv_stream": {"scale": 1.5, "ramp": 0.4},
    "spectral": {"damp": 1.0, "ramp": 0.4},
    "sum": {"scale": 0.4, "ramp": 0.4},
    "wudi_sums": {},
    "nufilt/all_linear": {},
}
JUDGED = ("tsv_stream", "spectral", "nufilt/all_linear")  # beside best
Updates = dict[str, Tensor]  # by layer, (d_o, d_i)


def main() -> None:
    """Score what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmarks", nargs="+", metavar="FOLDER:POOL[+POOL...][:TASKS]")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--judge", action="store_true", help="multiply only best")
    parser.add_argument("--orders", type=int, default=3)
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    methods = ["best", *JUDGED] if arguments.judge else arguments.methods.split(",")
    torch.set_num_threads(1)
    record = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for name in arguments.benchmarks:
        rows = record.setdefault(name, {})
        missing = [method for method in methods if method not in rows]
        benchmark = Benchmark(name) if missing else None
        for method in missing:
            rows["single"] = rows.get("single") or benchmark.single()
            one = arguments.judge and method != "best"
            rows[method] = (
                benchmark.judge(method, arguments.orders) if one else benchmark.measure(method)
            )
            arguments.out.write_text(json.dumps(record, indent=1))
            print(name, method, json.dumps(rows[method]), flush=True)


class Benchmark:
    """The pretrained model and the tasks of one or several pools, and what scores them."""

    def __init__(self, name: str) -> None:
        folder, pools, *count = name.split(":")
        search = f"hydra.searchpath=[file://{Path(folder).resolve()}/config]"
        experiments = [
            Experiment(compose_run([f"modelpool={pool}", search])) for pool in pools.split("+")
        ]
        self.experiment = experiments[0]
        self.tasks = list(self.experiment.tasks)[: int(count[0]) if count else None]
        with quiet():
            self.pretrained = load_model(self.experiment.modelpool, PRETRAINED)[0]
            self.models = {
                task: load_model(experiments[i % len(experiments)].modelpool, task)[0]
                for i, task in enumerate(self.tasks)
            }
            self.experiment.evaluator.check(self.pretrained, self.tasks)
        pool = self.experiment.evaluator.taskpool
        if hasattr(pool, "test_dataloaders"):
            pool.test_dataloaders = {
                task: list(pool.test_dataloaders[task]) for task in self.tasks
            }  # decoded once
        self.layers = select_layers(self.pretrained, "all-linear", ())
        self.base = self.read(self.pretrained)

    def read(self, model: nn.Module) -> Updates:
        return {layer: view.read(model).detach() for layer, view in self.layers.items()}

    def difference(self, model: nn.Module) -> Updates:
        return {layer: weight - self.base[layer] for layer, weight in self.read(model).items()}

    def single(self) -> list[float]:
        """Return the accuracy, per cent, of the pretrained model and of every model on its task."""
        scores = [self.score(model, [task])[0] for task, model in self.models.items()]
        return [sum(self.score(self.pretrained, self.tasks)) / len(self.tasks), *scores]

    def score(self, model: nn.Module, tasks: list[str]) -> list[float]:
        with quiet(), torch.no_grad():
            report = self.experiment.evaluator.report(model, tasks)
        return [100 * score(report[task]) for task in tasks]

    def measure(self, method: str) -> dict[str, object]:
        """Return ACC and the worst task by multiple."""
        algorithm = LayerwiseMergingAlgorithm(method, evaluate="last", **METHODS[method])
        with quiet():
            merged = algorithm.run({PRETRAINED: self.pretrained, **self.models})
        X = self.difference(merged)
        curve: dict[str, tuple[float, float]] = {}

        def at(multiple: float) -> tuple[float, float]:
            for layer, view in self.layers.items():
                view.write(merged, self.base[layer] + multiple * X[layer])
            scores = self.score(merged, self.tasks)
            return sum(scores) / len(scores), min(scores)

        for multiple, direction in ((1.0, 2**0.5), (0.5**0.5, 0.5**0.5)):
            lost = 0.0
            while lost < 4 and 0.05 < multiple < 20:
                curve[f"{multiple:.4g}"] = here = at(multiple)
                lost = max(acc for acc, _ in curve.values()) - here[0]
                multiple *= direction
        return {"curve": dict(sorted(curve.items(), key=lambda item: float(item[0])))}

    def judge(self, method: str, orders: int) -> dict[str, object]:
        """Return ACC and the worst task of a method at its settings, by order."""
        results = []
        for seed in range(42, 42 + (orders if "nufilt" in method else 1)):
            algorithm = LayerwiseMergingAlgorithm(
                method, evaluate="last", seed=seed, **METHODS[method]
            )
            with quiet():
                merged = algorithm.run({PRETRAINED: self.pretrained, **self.models})
            scores = self.score(merged, self.tasks)
            results.append((sum(scores) / len(scores), min(scores)))
        return {"scores": results}


if __name__ == "__main__":
    main()
