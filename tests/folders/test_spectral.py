"""A method that keeps sums merges folders as it merges loaded models, and goes on from its state alone."""

import json
import pickle

import pytest
import torch
from lightning import Fabric
from lightning.fabric.loggers import TensorBoardLogger
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionModel

from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.folders import merge_folders
from tests.commands.helpers import nufilt
from tests.folders import helpers
from tests.folders.helpers import hashes, same, save_stream, tensors
from tests.folders.test_adapters import save_adapter
from tests.models import clip, llama, t5

STATE = "nufilt_state/model.safetensors"


def plan(folder, *args, **options):
    return helpers.plan(folder, *args, method="spectral", **options)


def merge(folder, *args, **options):
    return helpers.merge(folder, *args, method="spectral", **options)


def algorithm(**config):
    targets = {"target_modules": "all-linear", "other_params": "mean"}
    return LayerwiseMergingAlgorithm("spectral", **targets, shuffle_order=False, **config)


def manifest(folder):
    return json.loads((folder / "nufilt.json").read_text())


@pytest.mark.parametrize("make", [clip, t5, llama])
def test_float32_folders_give_the_algorithms_bits(tmp_path, make):
    models = save_stream(tmp_path, make())
    loaded = type(models["_pretrained_"]).from_pretrained(merge(tmp_path, ramp=0.4))
    assert same(loaded.state_dict(), algorithm(ramp=0.4).run(models).state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stream_at_once_is_the_stream_one_by_one(tmp_path, dtype):
    save_stream(tmp_path, llama(), dtype=dtype)
    whole = merge(tmp_path)
    merge(tmp_path, ["task1"], "one")
    merge(tmp_path, ["task2"], "two", merged="one")
    last = merge(tmp_path, ["task3"], "three", merged="two")
    layers = {key for key, value in tensors(whole).items() if "proj" in key}
    assert same(*({key: tensors(folder)[key] for key in layers} for folder in (last, whole)))
    assert same(load_file(last / STATE), load_file(whole / STATE))
    assert manifest(last)["state"] == manifest(whole)["state"]
    assert manifest(last)["warnings"] == []


def test_a_step_that_fusion_bench_saved_goes_on_as_a_folder(tmp_path):
    models = save_stream(tmp_path, clip())
    first = algorithm()
    first._fabric_instance = Fabric(devices=1, accelerator="cpu", loggers=TensorBoardLogger(tmp_path / "run", "", ""))
    first.run({name: models[name] for name in ("_pretrained_", "task1", "task2")})
    out = merge(tmp_path, ["task3"], merged="run/checkpoints/merged_model_1")
    assert same(CLIPVisionModel.from_pretrained(out).state_dict(), algorithm().run(models).state_dict())


def test_a_plan_that_went_to_another_machine_knows_the_state(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    merge(tmp_path, ["task1"], "one")
    sent = pickle.loads(pickle.dumps(plan(tmp_path, ["task2"], merged="one")))
    expected = merge(tmp_path, ["task2"], "expected", merged="one")
    assert hashes(merge_folders(sent, tmp_path / "out")) == hashes(expected)


def test_an_adapter_counts_where_it_changes_a_layer(tmp_path):
    base = llama(tie_word_embeddings=False)
    save_stream(tmp_path, base, tasks=1)
    save_adapter(tmp_path, type(base).from_pretrained(tmp_path / "base"))
    out = merge(tmp_path, ["task1", "adapter"])
    expected = tensors(merge(tmp_path, ["task1", "task9"], "full"))
    torch.testing.assert_close(tensors(out), expected, rtol=0, atol=1e-4)
    state = load_file(out / STATE)
    assert state["model.layers.0.self_attn.q_proj.count"] == 2
    assert state["model.layers.0.self_attn.k_proj.count"] == 1


def change_state(folder, change):
    state = load_file(folder / STATE)
    change(state)
    save_file(state, folder / STATE)


def double_the_votes(state):
    state["model.layers.0.mlp.up_proj.votes"] *= 2


def drop_a_layer(state):
    for name in ("votes", "mean", "count"):
        del state[f"model.layers.0.mlp.up_proj.{name}"]


def widen_a_layer(state):
    state["model.layers.0.mlp.up_proj.votes"] = torch.zeros(3, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (double_the_votes, r"'model\.layers\.0\.mlp\.up_proj\.votes' is not what was saved \(its sha256 differs\)"),
        (drop_a_layer, r"has no 'model\.layers\.0\.mlp\.up_proj\.votes' in nufilt_state/model\.safetensors"),
        (widen_a_layer, r"F32 \(3, 3\) is not float32 \(\d+, \d+\)"),
    ],
)
def test_a_state_that_was_changed_is_refused(tmp_path, change, message):
    save_stream(tmp_path, llama(), tasks=2)
    change_state(merge(tmp_path, ["task1"], "one"), change)
    with pytest.raises(ValueError, match=message):
        merge(tmp_path, ["task2"], merged="one")


def test_what_has_no_state_or_that_of_other_layers_or_of_another_method_is_refused(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    helpers.merge(tmp_path, ["task1"], "other", target_modules="all-linear")
    with pytest.raises(ValueError, match=r"other' has no 'model\.layers\.0.*goes on from its own merges of the same"):
        plan(tmp_path, ["task2"], "other")
    merge(tmp_path, ["task1"], "one")
    with pytest.raises(ValueError, match=r"one' has 'model\.layers\.0\.mlp.*of the same layers only"):
        plan(tmp_path, ["task2"], "one", target_modules=["self_attn"])
    about = tmp_path / "one" / "nufilt.json"
    content = manifest(about.parent)
    content["settings"]["method"] = "average"
    about.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="has that of another method in"):
        plan(tmp_path, ["task2"], "one")


def test_nufilt_on_top_of_it_deserves_a_warning(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    merge(tmp_path, ["task1"], "one")
    planned = helpers.plan(tmp_path, ["task2"], "one", target_modules="all-linear")
    assert any("method was 'spectral', is 'nufilt'" in text for text in planned.warnings)


def test_the_command_merges_all_linear_layers_and_its_result_is_a_recipe(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    models = ("--base", tmp_path / "base", "--task", tmp_path / "task1", "--task", tmp_path / "task2")
    code, text = nufilt("merge", "--method", "spectral", *models, "--out", tmp_path / "out", "kappa=0.8")
    assert (code, "step 2, 14 layers merged" in text) == (0, True), text
    assert same(tensors(tmp_path / "out"), tensors(merge(tmp_path, ["task1", "task2"], "expected", kappa=0.8)))
    assert "spectral accumulation" in (tmp_path / "out" / "README.md").read_text()
    code, text = nufilt("merge", tmp_path / "out" / "nufilt.json", "--out", tmp_path / "again")
    assert code == 0, text
    assert hashes(tmp_path / "again")[STATE] == hashes(tmp_path / "out")[STATE]
    assert same(tensors(tmp_path / "again"), tensors(tmp_path / "out"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "spectral", "null_rank=6"], "'null_rank' is not an option of method=spectral"),
        (["--kappa", "0.8"], "'kappa' is not an option of method=nufilt"),
        (["method=opcm"], "method must be one of nufilt, spectral"),
        (["--method", "spectral", "--damp", "0"], "damp must be a number > 0"),
    ],
)
def test_options_of_another_method_are_refused(tmp_path, words, message):
    code, text = nufilt("merge", "--base", "base", "--task", "task1", "--out", tmp_path / "out", *words)
    assert (code, message in text) == (1, True), text
