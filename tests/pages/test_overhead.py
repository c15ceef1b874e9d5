"""The table of costs, and what it is read from."""

from dataclasses import replace

import torch

from fusion_bench_nufilt.compare import experiment
from fusion_bench_nufilt.compare.experiment import WatchingEvaluator, solver_seconds
from fusion_bench_nufilt.continual.evaluation import TasksByName
from fusion_bench_nufilt.pages.comparison_tables import main_table
from tests.compare.helpers import CONFIG, comparison, finished


def test_the_total_is_the_solver_and_the_rest_and_iterations_are_those_of_the_method_that_is_run():
    run = replace(finished(42), solving_seconds=0.5, memory=3 * 10**9, parameters=87_500_000)
    without = finished(42, config={**CONFIG, "lora_rank": 0})
    wudi = finished(42, config={"base_method": {"iter_num": 50}})
    runs = {"nufilt": [run], "filter": [without], "wudi": [wudi]}
    table = main_table(comparison(runs, preset="overhead"))
    titles = ["iterations", "solving s", "merging s", "total s", "memory GB", "parameters M"]
    costs = table.texts[titles].T
    assert list(costs["nufilt"]) == ["6", "0.5", "3.0", "3.0", "3.0", "87.5"]
    assert list(costs["filter"]) == ["-", "-", "3.0", "3.0", "-", "-"]
    assert costs["wudi"]["iterations"] == "50"
    assert set(costs["pretrained"]) == {""}
    assert [note.partition(":")[0] for note in table.notes[-2:]] == ["total", "memory"]


def test_solving_is_from_the_making_of_an_optimizer_to_its_last_step(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    with solver_seconds() as seconds:
        one = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])  # at 0
        other = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])  # at 1
        for optimizer in (one, other, one):  # at 2, 3 and 4
            optimizer.step()
    one.step()
    assert sum(seconds) == (4 - 0) + (3 - 1)


class Memory:
    """A process's memory: what it holds, and its peak since the last reset."""

    def __init__(self):
        self.peak = 0
        self.held = 10

    def take(self, size):
        self.peak = max(self.peak, self.held + size)

    def reset(self, device):
        self.peak = self.held
        return True


class Hungry(TasksByName):
    """Scoring takes more memory than what comes before."""

    task_names = ("a",)

    def __init__(self, memory):
        self.memory = memory

    def load_test_data(self):
        return {}

    def evaluate(self, model, tasks=None, limit=None):
        self.memory.take(100)
        return {"a": {"accuracy": 1.0}}


def test_the_memory_of_scoring_is_not_that_of_merging(monkeypatch):
    memory = Memory()  # a real process gives back what others of its threads took, at any moment
    monkeypatch.setattr(experiment, "reset_peak", memory.reset)
    monkeypatch.setattr(experiment, "read_peak", lambda device: memory.peak)
    evaluator = WatchingEvaluator(Hungry(memory), torch.device("cpu"))
    model = torch.nn.Linear(1, 1)
    evaluator.report(model, ["a"])
    evaluator.watch()
    memory.take(20)
    for _ in range(2):
        evaluator.report(model, ["a"])
    assert evaluator.peak == 30
