"""The orders printed in the paper's appendix, and the GPUs that a run names."""

import random

import pytest
import torch

from fusion_bench_nufilt.continual.algorithm import task_order
from fusion_bench_nufilt.methods.options import DeviceConfig

CPU = torch.device("cpu")

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


def test_an_order_depends_on_the_seed_alone_or_on_the_pool():
    random.seed(0)
    state = random.getstate()
    orders = {tuple(task_order("abcdefgh", shuffle=True, seed=seed)) for seed in range(42, 52)}
    assert len(orders) == 10
    assert random.getstate() == state
    assert task_order("bac", shuffle=False, seed=42) == ["b", "a", "c"]


def test_gpus_are_named_by_their_numbers(monkeypatch):
    two = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert DeviceConfig([0, 1]).choose(CPU) == two
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert DeviceConfig("all").choose(CPU) == two
    assert DeviceConfig().choose(CPU) == [CPU]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="PyTorch sees no GPU"):
        DeviceConfig("all").choose(CPU)


def test_a_device_without_an_eigenvalue_solver_leaves_the_layers_to_the_cpu(caplog):
    assert DeviceConfig().choose(torch.device("mps")) == [CPU]
    assert "PyTorch has no eigenvalue solver for mps" in caplog.text


@pytest.mark.parametrize("devices", ["some", [], [-1], [True], "0,1", 2])
def test_what_is_no_list_of_gpus_is_refused(devices):
    with pytest.raises(
        ValueError, match=r"devices must be all, or a list of numbers of GPUs such as \[0,1\], got"
    ):
        DeviceConfig(devices)
