"""What a plan says of the memory and the disk space that it takes."""

import dataclasses
import math

import pytest
import torch

from fusion_bench_nufilt.merge import merge_folders
from fusion_bench_nufilt.merge.engine import batches, memory_limit
from fusion_bench_nufilt.merge.kept_state import KeptState
from fusion_bench_nufilt.merge.layer_jobs import layer_jobs, machine_of, peak_memory
from fusion_bench_nufilt.methods.options import Settings
from tests.merge.helpers import plan, save_stream
from tests.tiny_models import llama


def test_the_state_counts_in_memory_and_on_the_disk(stream):
    sums = plan(stream, method="spectral")
    weights = plan(stream, target_modules="all-linear")
    layer = sums.layers[0]
    shape = layer.view.shape
    sums_working = sums.method.working_bytes(shape, 4)
    weights_working = weights.method.working_bytes(shape, 4)
    numbers = 24  # three of them stand beside the votes
    weights_memory = layer_jobs(KeptState(weights))[0].memory
    more_memory = layer_jobs(KeptState(sums))[0].memory - weights_memory
    assert more_memory == sums_working - weights_working + numbers
    more_disk = sums.disk_bytes - weights.disk_bytes
    assert more_disk == sum(4 * math.prod(each.view.shape) + numbers for each in sums.layers)
    assert weights_memory == 3 * 4 * math.prod(shape) + weights_working


def test_a_sum_counts_wide_tasks_where_they_have_weights(stream):
    plain = plan(stream, method="sum")
    weighted = plan(stream, method="sum", settings={"weights": [0.5] * len(plain.tasks)})
    layer = plain.layers[0]
    more = layer_jobs(KeptState(weighted))[0].memory - layer_jobs(KeptState(plain))[0].memory
    # The base, the task, and what its weight makes of it, where a merged weight needs room for one.
    assert more == 2 * 4 * math.prod(layer.view.shape)


def test_layers_solved_together_on_an_accelerator_count_together(stream, monkeypatch):
    # As if there was an accelerator.
    monkeypatch.setattr("fusion_bench_nufilt.utils.devices.check_devices", torch.device)
    # What this process takes by itself grows while tests run.
    monkeypatch.setattr(
        "fusion_bench_nufilt.merge.layer_jobs.process_memory", lambda workers: 10**9
    )
    monkeypatch.setattr("fusion_bench_nufilt.merge.planning.process_memory", lambda workers: 10**9)
    free = plan(stream, settings={"device": "cuda"})

    def batch_memory(planned):
        batches_of_plan = batches(layer_jobs(KeptState(planned)), machine_of(planned))
        return [sum(job.memory for job in batch) for batch in batches_of_plan]

    assert sorted(map(len, batches(layer_jobs(KeptState(free)), machine_of(free)))) == [2, 4, 8]
    at_once = sum(batch_memory(free))  # one is read, one solved and one written
    assert peak_memory(free) == 10**9 + at_once
    bounded = plan(stream, settings={"device": "cuda", "max_memory": peak_memory(free) - 1})
    limit = memory_limit(layer_jobs(KeptState(bounded)), machine_of(bounded))
    assert max(batch_memory(bounded)) <= limit < at_once
    assert peak_memory(bounded) <= bounded.settings.max_memory


def test_a_manifest_records_what_the_result_depends_on_and_not_how_the_run_went(stream):
    settings = {key for key in plan(stream).options() if hasattr(Settings, key)}
    of_the_result = {"seed", "weights", "tokenizer", "state", "dtype"}
    assert settings == of_the_result | {"adapter", "rank"}


def test_nothing_is_written_into_a_plan_after_planning(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    planned = plan(tmp_path, ["task1", "task2"], method="best", other_params="mean")
    fields = {field.name: getattr(planned, field.name) for field in dataclasses.fields(planned)}
    warnings = list(planned.warnings)
    merge_folders(planned, tmp_path / "out")
    for name, value in fields.items():
        assert getattr(planned, name) is value
    assert planned.warnings == warnings
    with pytest.raises(dataclasses.FrozenInstanceError):
        planned.settings = Settings()
