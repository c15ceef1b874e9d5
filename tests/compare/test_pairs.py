"""Runs side by side: which process takes which GPU."""

import os
from queue import SimpleQueue

import pytest
import torch

from fusion_bench_nufilt.compare import pairs


@pytest.mark.parametrize(
    ("visible", "count", "expected"),
    [("4,7", 2, ["4", "7", "4"]), (None, 2, ["0", "1", "0"]), ("GPU-a", 1, ["GPU-a"] * 3), (None, 0, [None] * 3)],
)
def test_process_i_takes_gpu_i_modulo_their_number(monkeypatch, visible, count, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert pairs.assign_gpus(3) == expected


def test_a_process_sees_its_own_gpu_alone(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr(pairs, "Workbench", lambda config: config)
    monkeypatch.setattr(pairs, "compose_run", list)
    monkeypatch.setattr(pairs, "_workbench", None, raising=False)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    gpus = SimpleQueue()
    for gpu in ("7", None):
        gpus.put(gpu)
    for _ in range(2):  # the second has none of its own, and leaves things as they are
        pairs.start_process([], 1, gpus)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
