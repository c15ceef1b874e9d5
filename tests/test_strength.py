"""The rule of docs/notes/strength.md, as the benchmark measures it."""

import sys

import pytest
import torch

from tests.conftest import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

from strength import Benchmark


def benchmark(tasks):
    made = Benchmark.__new__(Benchmark)
    made.vectors = {name: {"layer": tau} for name, tau in tasks.items()}
    made.base = {"layer": torch.eye(8, dtype=torch.float64)}
    return made


@pytest.fixture
def taus():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(8, 8, generator=generator, dtype=torch.float64) for name in "abc"}


def test_the_final_update_does_not_depend_on_the_methods_own_strength(taus):
    X = {"layer": sum(taus.values())}
    multiples = [benchmark(taus).numbers({"layer": s * X["layer"]})["multiple"] * s for s in (0.1, 1, 30)]
    assert multiples == pytest.approx(multiples[:1] * 3)


def test_the_rule_does_not_depend_on_the_order_of_the_tasks(taus):
    X = {"layer": sum(taus.values())}
    backwards = dict(reversed(taus.items()))
    assert benchmark(taus).numbers(X) == pytest.approx(benchmark(backwards).numbers(X))


def test_a_layer_that_no_task_moved_does_not_count(taus):
    X = {"layer": sum(taus.values())}
    expected, made = benchmark(taus).numbers(X), benchmark(taus)
    still = torch.zeros(8, 8, dtype=torch.float64)
    made.base["still"] = torch.ones_like(still)
    for tau in made.vectors.values():
        tau["still"] = still
    assert made.numbers({**X, "still": still}) == pytest.approx(expected)


def test_tasks_of_disjoint_directions_keep_themselves_whole():
    taus = {"a": torch.diag(torch.tensor([2.0, 1, 0, 0, 0, 0, 0, 0])).double()}
    taus["b"] = taus["a"].roll((4, 4), (0, 1))
    assert benchmark(taus).numbers({"layer": taus["a"] + taus["b"]})["kept"] == pytest.approx(1)
