"""The dtypes and the files of a result are the base's, or those that are asked for."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from fusion_bench_nufilt.merge.folders import merge_folders
from fusion_bench_nufilt.utils.tensors import describe, make_header, read_header
from tests.docs import run_program
from tests.merge.helpers import (
    change,
    manifest,
    merge,
    plan,
    same,
    save_merged_adapters,
    save_stream,
    tensors,
)
from tests.tiny_models import llama

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_floating_point_tensor_has_the_dtype_that_is_asked_for(stream, dtype):
    torch_dtype = getattr(torch, dtype)
    out = merge(stream, settings={"dtype": dtype})
    as_it_is = tensors(merge(stream, out="as_it_is"))
    assert same(tensors(out), {key: value.to(torch_dtype) for key, value in as_it_is.items()})
    config = json.loads((out / "config.json").read_text())
    assert {config.get(key, dtype) for key in ("dtype", "torch_dtype")} == {dtype}
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch_dtype


def test_a_float32_result_of_a_bfloat16_base_is_not_rounded_in_between(tmp_path):
    save_stream(tmp_path, llama(), dtype=torch.bfloat16)
    exact = merge(tmp_path, out="exact", settings={"dtype": "float32"})
    kept = merge(tmp_path, out="kept", settings={"state": True})
    state = load_file(kept / "nufilt_state" / "model.safetensors")
    assert state
    for key, value in state.items():
        assert torch.equal(value, tensors(exact)[key.replace(".state.", ".")])
    merge(tmp_path, ["task1"], "one", settings={"dtype": "float32"})
    two = merge(tmp_path, ["task2", "task3"], "two", merged="one", settings={"dtype": "float32"})
    assert same(tensors(two), tensors(exact))


@pytest.fixture(scope="module")
def merged_adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged_adapters")
    save_merged_adapters(folder)
    return folder


@pytest.mark.parametrize(
    ("tasks", "dtype", "weights"),
    [
        (["task1", "task2"], "auto", [0.7, 0.9]),
        (["task1", "task2"], "float32", None),
        (["task1", "wide2"], "auto", None),
        (["task1", "wide2"], "float32", [0.7, 0.9]),
    ],
)
def test_what_is_rounding_does_not_depend_on_the_results_dtype_nor_on_weights(
    merged_adapters, tmp_path, tasks, dtype, weights
):
    settings = {"dtype": dtype, "weights": weights}
    planned = plan(merged_adapters, tasks, settings=settings, null_rank=64)
    for reports in manifest(merge_folders(planned, tmp_path / "out"))["layers"].values():
        assert reports[1]["protected_rank"] == 2


@pytest.mark.parametrize(
    ("method", "options"),
    [("nufilt", {"null_rank": 64}), ("tsv_stream", {}), ("best", {})],
)
def test_the_rounding_of_tasks_is_weighted_with_them(merged_adapters, tmp_path, method, options):
    """At 1.5 it was taken for directions of their own."""
    base = tensors(merged_adapters / "base")
    updates = {}
    for weight in (1.0, 1.5):
        settings = {"dtype": "float32", "weights": [weight, weight]}
        planned = plan(
            merged_adapters, ["task1", "task2"], method=method, settings=settings, **options
        )
        merged = tensors(merge_folders(planned, tmp_path / str(weight)))
        parts = [(merged[key] - base[key].float()).flatten() for key in base if "proj" in key]
        updates[weight] = torch.cat(parts) / weight
    difference = updates[1.5] - updates[1.0]
    assert difference.norm() < 1e-2 * updates[1.0].norm()


def test_values_that_the_dtype_can_not_hold_are_refused_by_name(stream):
    change(stream / "base", "model.norm.weight", lambda value: value.fill_(1e6))
    message = r"'model.norm.weight' has values that torch.float16 can't hold: choose"
    with pytest.raises(ValueError, match=message):
        merge(stream, settings={"dtype": "float16"})
    assert not (stream / "out").exists()


def test_a_file_without_a_changed_tensor_is_the_bases_own_in_every_step(stream):
    """Also its order of tensors; whoever has the base needs no other copy."""
    options = {"target_modules": ["q_proj"], "other_params": "pretrained"}
    one = merge(stream, ["task1"], "one", **options)
    two = merge(stream, ["task2"], "two", merged="one", **options)
    for out in (one, two):
        kept = 0
        for file in sorted(out.glob("*.safetensors")):
            of_base = stream / "base" / file.name
            is_base = file.read_bytes() == of_base.read_bytes()
            assert is_base != any("q_proj" in key for key in load_file(file))
            kept += is_base
        assert kept == 4  # of six


@pytest.mark.parametrize(
    ("metadata", "dtype"), [({"format": "pt", "made_by": "hand"}, "bfloat16"), (None, "auto")]
)
def test_a_file_says_of_itself_what_the_bases_does(stream, metadata, dtype):
    for file in (stream / "base").glob("*.safetensors"):
        save_file(load_file(file), file, metadata)
    out = merge(stream, settings={"dtype": dtype})
    for file in out.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == (metadata or {"format": "pt"})


def test_tensors_of_a_file_are_aligned_whatever_their_sizes():
    state = {
        "bytes": torch.ones(1001, dtype=torch.uint8),
        "halves": torch.ones(77, dtype=torch.float16),
        "singles": torch.ones(33),
        "doubles": torch.ones(5, dtype=torch.float64),
        "matrix": torch.ones(8, 8, dtype=torch.bfloat16),
    }
    header = make_header({key: describe(value) for key, value in state.items()})
    places = read_header("", header)
    assert list(places) == ["matrix", "doubles", "singles", "halves", "bytes"]
    for key, info in places.items():
        assert info.start % state[key].itemsize == 0


def test_pickled_weights_are_refused_with_a_program_that_saves_them_as_safetensors(stream):
    model = AutoModelForCausalLM.from_pretrained(stream / "task1")
    expected = tensors(merge(stream, ["task1", "task2"], "expected"))
    folder = stream / "task1"
    (folder / "model.safetensors").unlink()
    state = model.state_dict()
    # As transformers has it, and as Lightning and open_clip, which know no config.json.
    for name, content in {"pytorch_model.bin": state, "last.ckpt": {"state_dict": state}}.items():
        torch.save(content, folder / name)
        message = (
            rf"pickled weights \('{name}'\), which run code .*troubleshooting.md#pickled-weights"
        )
        with pytest.raises(ValueError, match=message):
            plan(stream)
        run_program("pickled-weights", folder / name, folder / "model.safetensors")
        assert same(tensors(merge(stream, ["task1", "task2"], name.partition(".")[0])), expected)
        (folder / "model.safetensors").unlink()
        (folder / name).unlink()
    torch.save(nn.Linear(2, 2), folder / "finetuned.pt")
    with pytest.raises(
        ValueError, match=r"pickled objects of 'torch\.nn\.modules\.linear\.Linear'"
    ):
        plan(stream)
