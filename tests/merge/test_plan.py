"""What a plan says of the memory and the disk space that it takes."""

import math

import torch

from fusion_bench_nufilt.merge import Settings, forecast
from fusion_bench_nufilt.merge.forecast import batches, layer_budget, layer_memory, peak_memory
from tests.merge.helpers import plan


def test_the_state_counts_in_memory_and_on_the_disk(stream):
    sums, weights = plan(stream, method="spectral"), plan(stream, target_modules="all-linear")
    layer = sums.layers[0]
    elements = math.prod(layer.view.shape)
    working = sums.method.working_bytes(layer.view.shape, 8) - weights.method.working_bytes(
        layer.view.shape, 4
    )
    assert (
        layer_memory(sums, layer) - layer_memory(weights, layer) == working + 24
    )  # three numbers beside the votes
    more = forecast.disk_bytes(sums) - forecast.disk_bytes(weights)
    assert more == sum(4 * math.prod(each.view.shape) + 24 for each in sums.layers)
    assert layer_memory(weights, layer) == 3 * 4 * elements + weights.method.working_bytes(
        layer.view.shape, 4
    )


def test_layers_solved_together_on_an_accelerator_count_together(stream, monkeypatch):
    monkeypatch.setattr(
        "fusion_bench_nufilt.utils.devices.check_devices", torch.device
    )  # as if there was one
    # What this process takes by itself grows while tests run.
    monkeypatch.setattr(forecast, "process_memory", lambda workers: 10**9)
    monkeypatch.setattr("fusion_bench_nufilt.merge.planning.process_memory", lambda workers: 10**9)
    free = plan(stream, settings={"device": "cuda"})

    def held(planned):
        return [
            sum(layer_memory(planned, layer) for layer in batch)
            for batch in batches(planned, planned.layers)
        ]

    assert sorted(map(len, batches(free, free.layers))) == [2, 4, 8]
    assert peak_memory(free) == 10**9 + sum(held(free))  # one is read, one solved and one written
    bounded = plan(stream, settings={"device": "cuda", "max_memory": peak_memory(free) - 1})
    assert max(held(bounded)) <= layer_budget(bounded) < sum(held(free))
    assert peak_memory(bounded) <= bounded.settings.max_memory


def test_a_manifest_records_what_the_result_depends_on_and_not_how_the_run_went(stream):
    settings = {key for key in plan(stream).options() if hasattr(Settings, key)}
    assert settings == {
        "seed",
        "weights",
        "tokenizer",
        "state",
        "dtype",
        "max_shard_size",
    }
