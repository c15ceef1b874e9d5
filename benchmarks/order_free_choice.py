"""Choose the settings of the order-free methods on a development set, by the rule in
docs/notes/order_free_rule.md.

    python benchmarks/order_free_choice.py --out CHOICE.json nufilt_demo JUDGES_11:judge_demo
    JUDGES_0:judge_mini8 ...

A benchmark is a model pool, or FOLDER:POOL for one in FOLDER/config, as judges.py leaves it. A
member merges the tasks once; every setting of its grid is then one rendering of its state and one
scoring of the model. Scores are kept in the file, so an interrupted run goes on, and further
benchmarks can be added. Prints a table of all settings in Markdown.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.compare.configs import compose_run, quiet
from fusion_bench_nufilt.compare.experiment import Experiment
from fusion_bench_nufilt.methods import State
from fusion_bench_nufilt.stream.evaluation import score
from fusion_bench_nufilt.stream.models import PRETRAINED, load_model

Setting = dict[str, float]
Scores = dict[str, dict[str, float]]  # ACC by benchmark, and by the name and setting of a member

RAMPS = (0.0, 0.4)
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "sum": {"scale": (0.2, 0.3, 0.4)},
    "isotropic": {"scale": (1.0, 1.3, 1.6, 2.0, 2.5)},
    "wudi_sums": {"scale": (0.8, 1.0, 1.2), "eps": (0.01, 0.1)},
    "tsv_stream": {"scale": (1.0, 1.25, 1.5, 1.75)},
    "sylvester": {"scale": (0.8, 1.0, 1.2), "eps": (0.001, 0.01, 0.1)},
    "spectral": {"kappa": (0.9,), "damp": (0.5, 1.0)},
}
MIXTURES = (("spectral", "sylvester"), ("tsv_stream", "sylvester"), ("tsv_stream", "spectral"))


def main() -> None:
    """Score what is missing, choose, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmarks", nargs="+", metavar="[FOLDER:]POOL")
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    scores: Scores = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    benchmarks = {name: Benchmark(name) for name in arguments.benchmarks}

    def fill(text: str, members: dict[str, Setting]) -> None:
        for name, benchmark in benchmarks.items():
            if name not in scores.setdefault(text, {}):
                scores[text][name] = benchmark.score(members)
                arguments.out.write_text(json.dumps(scores, indent=1))

    for member, setting in settings():
        fill(describe(member, setting), {member: setting})
    best = {member: choose(member, scores) for member in GRIDS}
    for pair, ramp in product(MIXTURES, RAMPS):
        members = {member: best[member] | {"ramp": ramp} for member in pair}
        fill(" + ".join(describe(*member) for member in members.items()), members)
    print_table(scores, list(benchmarks))


def settings() -> Iterator[tuple[str, Setting]]:
    """Yield the settings of each member."""
    for member, grid in GRIDS.items():
        for values in product(*grid.values(), RAMPS):
            yield member, dict(zip((*grid, "ramp"), values, strict=True))


def describe(member: str, setting: Setting) -> str:
    return ":".join([member, *(f"{key}={value:g}" for key, value in setting.items())])


def choose(member: str, scores: Scores) -> Setting:
    """Return the setting with the best mean over the benchmarks, or the first of equals."""
    own = [setting for name, setting in settings() if name == member]
    return max(own, key=lambda setting: sum(scores[describe(member, setting)].values()))


class Benchmark:
    """A model pool and its task pool, and the states of the members that have merged it."""

    def __init__(self, name: str) -> None:
        folder, _, pool = name.rpartition(":")
        path = [f"hydra.searchpath=[file://{Path(folder).resolve()}/config]"] if folder else []
        self.experiment = Experiment(compose_run([f"modelpool={pool}", *path]))
        self._merged: dict[str, tuple[LayerwiseMergingAlgorithm, nn.Module]] = {}

    def score(self, members: dict[str, Setting]) -> float:
        """Return ACC, per cent, of the mean of the members' updates."""
        weights: list[dict[str, Tensor]] = []
        with quiet(), torch.no_grad():
            for member, setting in members.items():
                algorithm, model = self._merge(member)
                method = type(algorithm.method)(
                    algorithm.method.Options(**setting), list(algorithm.layers)
                )
                weights.append(
                    dict(method.weigh_each(states_of(algorithm), self._pretrained(algorithm)))
                )
            for layer, view in algorithm.layers.items():
                view.write(model, sum(each[layer] for each in weights) / len(weights))
            report = self.experiment.evaluator.report(model, self.experiment.tasks)
        return (
            100
            * sum(score(report[task]) for task in self.experiment.tasks)
            / len(self.experiment.tasks)
        )

    def _merge(self, member: str) -> tuple[LayerwiseMergingAlgorithm, nn.Module]:
        if member not in self._merged:
            algorithm = LayerwiseMergingAlgorithm(member, evaluate="last")
            self._merged[member] = algorithm, algorithm.run(self.experiment.modelpool)
        return self._merged[member]

    def _pretrained(self, algorithm: LayerwiseMergingAlgorithm) -> dict[str, Tensor]:
        pretrained, _ = load_model(self.experiment.modelpool, PRETRAINED)
        return {layer: view.read(pretrained) for layer, view in algorithm.layers.items()}


def states_of(algorithm: LayerwiseMergingAlgorithm) -> dict[str, State]:
    """Return what the method keeps of each layer."""
    states: dict[str, State] = {layer: {} for layer in algorithm.layers}
    for key, value in algorithm.state().items():
        layer, _, name = key.rpartition(".")
        states[layer][name] = value
    return states


def print_table(scores: Scores, benchmarks: list[str]) -> None:
    titles = [Path(name).name for name in benchmarks]
    print(
        "| member and setting | "
        + " | ".join(titles)
        + " | mean |\n| --- |"
        + " ---: |" * (len(titles) + 1)
    )
    rows = {
        text: [row[name] for name in benchmarks]
        for text, row in scores.items()
        if {*benchmarks} <= {*row}
    }
    means = {text: sum(row) / len(row) for text, row in rows.items()}
    for text, row in rows.items():
        rivals = [mean for other, mean in means.items() if members_of(other) == members_of(text)]
        mean = f"**{means[text]:.2f}**" if means[text] == max(rivals) else f"{means[text]:.2f}"
        print(f"| `{text}` | " + " | ".join(f"{score:.2f}" for score in row) + f" | {mean} |")


def members_of(text: str) -> list[str]:
    return [member.partition(":")[0] for member in text.split(" + ")]


if __name__ == "__main__":
    main()
