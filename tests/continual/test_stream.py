"""The orders printed in the paper's appendix."""

import random

import pytest

from fusion_bench_nufilt.continual import task_order

PRINTED = {
    (8, 42): "4 5 7 8 3 6 1 2",
    (8, 43): "7 8 5 4 2 6 3 1",
    (8, 44): "3 6 4 2 1 8 5 7",
    (8, 51): "8 3 1 2 6 5 7 4",
    (14, 42): "9 13 8 7 14 12 6 3 10 4 5 1 2 11",
    (20, 42): "20 6 15 5 10 14 16 19 7 13 18 11 2 12 3 17 8 9 1 4",
}


@pytest.mark.parametrize(("tasks", "seed"), PRINTED)
def test_a_seed_gives_the_order_printed_in_the_paper(tasks, seed):
    order = task_order([str(i + 1) for i in range(tasks)], shuffle=True, seed=seed)
    assert " ".join(order) == PRINTED[tasks, seed]


def test_an_order_depends_on_the_seed_alone():
    random.seed(0)
    state = random.getstate()
    orders = {tuple(task_order("abcdefgh", shuffle=True, seed=seed)) for seed in range(42, 52)}
    assert len(orders) == 10
    assert random.getstate() == state


def test_without_shuffling_the_pool_decides():
    assert task_order(["b", "a", "c"], shuffle=False, seed=42) == ["b", "a", "c"]
