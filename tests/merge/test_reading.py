"""How often the weights of the models are read."""

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from fusion_bench_nufilt.merge import merge_folders, other_params, strength
from fusion_bench_nufilt.utils.tensors import TensorFile
from tests.families import FAMILIES
from tests.merge.helpers import plan, save_stream, tensors
from tests.models import test_experts, test_mxfp4, test_quantised


@pytest.fixture
def bytes_read(monkeypatch):
    """The number of bytes that were read of the tensors of each folder, by its name."""
    counts: Counter[str] = Counter()
    read = TensorFile.read_bytes

    def counted(self, start, stop):
        counts[self.path.parent.name] += stop - start
        return read(self, start, stop)

    monkeypatch.setattr(TensorFile, "read_bytes", counted)
    return counts


def sizes(folder, *names):
    """The number of bytes of all tensors of each folder, by its name."""
    nbytes = {}
    for name in names:
        nbytes[name] = sum(value.nbytes for value in tensors(folder / name).values())
    return nbytes


@pytest.mark.parametrize("method", ["nufilt", "tsv_stream"])
def test_a_merge_reads_every_tensor_of_every_model_once(stream, bytes_read, method):
    planned = plan(stream, method=method, other_params="mean")
    bytes_read.clear()
    merge_folders(planned, stream / "out")
    assert bytes_read == sizes(stream, "base", "task1", "task2", "task3")


def test_best_reads_the_layers_again_from_which_it_finds_the_strength_of_a_task(
    stream, bytes_read, note_calls
):
    def name_and_layer(base, task, layer, device):
        return Path(task.source.name).name, layer

    measured = note_calls(strength, "_spectrum_of", name_and_layer)
    planned = plan(stream, method="best", other_params="mean")
    bytes_read.clear()
    merge_folders(planned, stream / "out")
    assert len(planned.layers) == 14  # fewer than are looked at
    expected = sizes(stream, "base", "task1", "task2", "task3")
    for name, layer in measured:
        nbytes = planned.base.tensors[layer.keys[0]].nbytes
        expected[name] += nbytes
        expected["base"] += nbytes
    assert bytes_read == expected
    assert len({(name, layer.name) for name, layer in measured}) == len(measured) == 3 * 14


def test_a_plan_reads_a_sample_of_the_base_once_for_all_tasks(stream, bytes_read):
    plan(stream, ["task1"])
    for_one = bytes_read["base"]
    bytes_read.clear()
    plan(stream, ["task1", "task2", "task3"])
    assert bytes_read["base"] == for_one > 0


@pytest.mark.parametrize("quantisation", ["MXFP4", "FP8"])
def test_what_is_quantised_outside_the_layers_is_decoded_once(
    tmp_path, bytes_read, monkeypatch, quantisation
):
    monkeypatch.setattr(other_params, "CHUNK_BYTES", 2**11)  # a few rows
    if quantisation == "MXFP4":
        save_stream(tmp_path, FAMILIES["gpt_oss"](), tasks=2, dtype=torch.bfloat16)
        quantise = test_mxfp4.quantise
    else:
        save_stream(tmp_path, test_quantised.llama(), tasks=2, dtype=torch.bfloat16)
        quantise = test_quantised.quantise
    quantise(tmp_path / "base")
    quantise(tmp_path / "task1")
    planned = plan(tmp_path, ["task1", "task2"], target_modules=["q_proj"], other_params="mean")
    bytes_read.clear()
    merge_folders(planned, tmp_path / "out")
    assert bytes_read == sizes(tmp_path, "base", "task1", "task2")


@test_experts.fused
@pytest.mark.parametrize("target_modules", ["all-linear", ["q_proj"]])
@pytest.mark.parametrize("experts", [4, 8])
def test_the_factors_of_fused_experts_are_read_once_however_many_experts_there_are(
    tmp_path, bytes_read, monkeypatch, experts, target_modules
):
    monkeypatch.setattr(other_params, "CHUNK_BYTES", 2**11)
    test_experts.save_adapter(tmp_path, partial(test_experts.qwen3_moe, num_experts=experts))
    planned = plan(tmp_path, ["adapter"], target_modules=target_modules, other_params="mean")
    bytes_read.clear()
    merge_folders(planned, tmp_path / "out")
    # What the plan has looked at need not be read again.
    assert 0 < bytes_read["adapter"] <= sizes(tmp_path, "adapter")["adapter"]
