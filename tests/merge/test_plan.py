"""What a plan says of its time: never how long it is, but what it depends on."""

import math

import pytest
import torch

from fusion_bench_nufilt.merge import forecast
from fusion_bench_nufilt.merge.forecast import batches, layer_budget, layer_memory, peak_memory, predict_seconds
from fusion_bench_nufilt.methods import METHODS
from tests.merge.helpers import plan


def test_layers_that_are_solved_are_counted_and_bytes_that_are_read(stream, monkeypatch):
    def seconds(tasks, merged=None):
        return predict_seconds(plan(stream, tasks, merged, settings={"step": 1}), workers=1)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(forecast, "_rates", lambda *_: (0.0, 1.0))
    nbytes = plan(stream, ["task1"]).base.nbytes
    assert seconds(["task1", "task2"]) == 4 * nbytes  # three read, one written
    monkeypatch.setattr(forecast, "_rates", lambda *_: (1.0, 0.0))
    assert seconds(["task1"]) == 0  # the first task is taken as it is
    once = seconds(["task1", "task2"])
    assert once > 0
    assert seconds(["task1", "task2"], "task1") == 2 * once
    assert predict_seconds(plan(stream, ["task1", "task2"]), workers=2) == once / 2


@pytest.mark.parametrize("name", METHODS)
def test_a_sample_of_every_method_is_merged(name, monkeypatch):
    monkeypatch.setattr(forecast, "_SAMPLE_WIDTH", 128)
    method = METHODS[name](METHODS[name].Options(), ["layer"])
    assert all(rate > 0 for rate in forecast._rates(method, "layer", workers=1))


def test_the_state_counts_in_memory_and_on_the_disk(stream):
    sums, weights = plan(stream, method="spectral"), plan(stream, target_modules="all-linear")
    layer = sums.layers[0]
    elements = math.prod(layer.view.shape)
    working = sums.method.working_bytes(layer.view.shape, 8) - weights.method.working_bytes(layer.view.shape, 4)
    assert layer_memory(sums, layer) - layer_memory(weights, layer) == working + 16  # two numbers beside the votes
    more = forecast.disk_bytes(sums) - forecast.disk_bytes(weights)
    assert more == sum(4 * math.prod(each.view.shape) + 16 for each in sums.layers)
    assert layer_memory(weights, layer) == 3 * 4 * elements + weights.method.working_bytes(layer.view.shape, 4)


def test_layers_solved_together_on_an_accelerator_count_together(stream, monkeypatch):
    monkeypatch.setattr("fusion_bench_nufilt.merge.plan.check_devices", torch.device)  # as if there was one
    # What this process takes by itself grows while tests run.
    monkeypatch.setattr(forecast, "process_memory", lambda workers: 10**9)
    monkeypatch.setattr("fusion_bench_nufilt.merge.checks.process_memory", lambda workers: 10**9)
    free = plan(stream, settings={"device": "cuda"})

    def held(planned):
        return [sum(layer_memory(planned, layer) for layer in batch) for batch in batches(planned, planned.layers)]

    assert sorted(map(len, batches(free, free.layers))) == [2, 4, 8]
    assert peak_memory(free) == 10**9 + sum(held(free))  # one is read, one solved and one written
    bounded = plan(stream, settings={"device": "cuda", "max_memory": peak_memory(free) - 1})
    assert max(held(bounded)) <= layer_budget(bounded) < sum(held(free))
    assert peak_memory(bounded) <= bounded.settings.max_memory
