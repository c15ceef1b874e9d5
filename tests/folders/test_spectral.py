"""Spectral accumulation of folders is that of loaded models, and what it reads off the weights is kept exact."""

import json
import pickle

import pytest
import torch
from lightning import Fabric
from lightning.fabric.loggers import TensorBoardLogger
from safetensors.torch import load_file
from transformers import CLIPVisionModel

from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.core.spectral import SpectralConfig
from fusion_bench_nufilt.folders import Settings, merge_folders, plan_merge
from fusion_bench_nufilt.layers import TargetConfig
from tests.commands.helpers import nufilt
from tests.folders.helpers import hashes, same, save_stream, tensors
from tests.folders.helpers import merge as merge_nufilt
from tests.folders.test_adapters import save_adapter
from tests.models import clip, llama, t5

TARGETS = {"target_modules": "all-linear", "other_params": "mean"}
TASKS = ("task1", "task2", "task3")
STATE = "nufilt_state/model.safetensors"


def plan(folder, tasks=TASKS, merged=None, accumulate="stored", **config):
    models = [str(folder / task) for task in tasks]
    merged = None if merged is None else str(folder / merged)
    settings = Settings(accumulate=accumulate)
    return plan_merge(str(folder / "base"), models, merged, SpectralConfig(**config), TargetConfig(**TARGETS), settings)


def merge(folder, tasks=TASKS, out="out", **options):
    return merge_folders(plan(folder, tasks, **options), folder / out)


def algorithm(**config):
    return LayerwiseMergingAlgorithm("spectral", **TARGETS, shuffle_order=False, **config)


def manifest(folder):
    return json.loads((folder / "nufilt.json").read_text())


@pytest.mark.parametrize("make", [clip, t5, llama])
def test_float32_folders_give_the_algorithms_bits(tmp_path, make):
    models = save_stream(tmp_path, make())
    loaded = type(models["_pretrained_"]).from_pretrained(merge(tmp_path, ramp=0.4))
    assert same(loaded.state_dict(), algorithm(ramp=0.4).run(models).state_dict())


def test_a_stream_at_once_is_the_stream_one_by_one(tmp_path):
    save_stream(tmp_path, llama())
    whole = merge(tmp_path)
    merge(tmp_path, ["task1"], "one")
    merge(tmp_path, ["task2"], "two", merged="one")
    last = merge(tmp_path, ["task3"], "three", merged="two")
    assert same(tensors(last), tensors(whole))
    assert manifest(last)["votes"] == manifest(whole)["votes"]
    assert {count for _, count in manifest(last)["votes"].values()} == {3}
    assert manifest(last)["warnings"] == []


def test_a_step_that_fusion_bench_saved_goes_on_as_a_folder(tmp_path):
    models = save_stream(tmp_path, clip())
    first = algorithm()
    first._fabric_instance = Fabric(devices=1, accelerator="cpu", loggers=TensorBoardLogger(tmp_path / "run", "", ""))
    first.run({name: models[name] for name in ("_pretrained_", "task1", "task2")})
    out = merge(tmp_path, ["task3"], merged="run/checkpoints/merged_model_1")
    assert same(CLIPVisionModel.from_pretrained(out).state_dict(), algorithm().run(models).state_dict())


def test_a_plan_that_went_to_another_machine_knows_the_votes(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    merge(tmp_path, ["task1"], "one")
    sent = pickle.loads(pickle.dumps(plan(tmp_path, ["task2"], merged="one")))
    expected = merge(tmp_path, ["task2"], "expected", merged="one")
    assert hashes(merge_folders(sent, tmp_path / "out")) == hashes(expected)


def test_a_run_that_was_interrupted_goes_on_with_the_same_files(tmp_path):
    class StopError(Exception):
        pass

    def stop(done, total):
        if done >= 8:
            raise StopError

    save_stream(tmp_path, llama())
    expected = hashes(merge(tmp_path, out="expected"))
    with pytest.raises(StopError):
        merge_folders(plan(tmp_path), tmp_path / "out", stop)
    assert hashes(merge(tmp_path)) == expected


def test_an_adapter_counts_as_a_vote_where_it_changes_a_layer(tmp_path):
    base = llama(tie_word_embeddings=False)
    save_stream(tmp_path, base, tasks=1)
    save_adapter(tmp_path, type(base).from_pretrained(tmp_path / "base"))
    out = merge(tmp_path, ["task1", "adapter"])
    expected = tensors(merge(tmp_path, ["task1", "task9"], "full"))
    torch.testing.assert_close(tensors(out), expected, rtol=0, atol=1e-4)
    votes = manifest(out)["votes"]
    assert votes["model.layers.0.self_attn.q_proj"][1] == 2
    assert votes["model.layers.0.self_attn.k_proj"][1] == 1


def test_bfloat16_models_are_merged_as_in_float32_where_that_is_kept_beside_them(tmp_path):
    models = save_stream(tmp_path, llama(), dtype=torch.bfloat16)
    whole = merge(tmp_path, accumulate="float32")
    merge(tmp_path, ["task1", "task2"], "two", accumulate="float32")
    assert (
        hashes(merge(tmp_path, ["task3"], "three", merged="two", accumulate="float32"))[STATE] == hashes(whole)[STATE]
    )
    expected = algorithm().run({name: model.float() for name, model in models.items()}).state_dict()
    for key, value in load_file(whole / STATE).items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=0)
        assert torch.equal(tensors(whole)[key], value.bfloat16())


def test_bfloat16_models_are_refused_where_float32_is_not_kept(tmp_path):
    save_stream(tmp_path, llama(), tasks=2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"bfloat16: --accumulate float32 keeps"):
        plan(tmp_path, ["task1"])
    out = merge(tmp_path, ["task1"], accumulate="float32")
    (out / STATE).unlink()
    (out / STATE).parent.rmdir()
    with pytest.raises(ValueError, match="does not have it in float32: merge with --accumulate float32 from the start"):
        plan(tmp_path, ["task2"], merged="out", accumulate="float32")


def test_what_another_method_merged_is_refused(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    merge_nufilt(tmp_path, ["task1"], **TARGETS)
    with pytest.raises(ValueError, match=r"'.*out' has no votes in its nufilt\.json for 'model\.layers.0"):
        plan(tmp_path, ["task2"], merged="out")


def test_nufilt_on_top_of_it_deserves_a_warning(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    merge(tmp_path, ["task1"], "one")
    warnings = manifest(merge_nufilt(tmp_path, ["task2"], merged="one", **TARGETS))["warnings"]
    assert any("method was 'spectral', is 'nufilt'" in text for text in warnings)


def test_the_command_merges_all_linear_layers_and_its_result_is_a_recipe(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    models = ("--base", tmp_path / "base", "--task", tmp_path / "task1", "--task", tmp_path / "task2")
    code, text = nufilt("merge", "--method", "spectral", *models, "--out", tmp_path / "out", "kappa=0.8")
    assert (code, "step 2, 14 layers merged" in text) == (0, True), text
    assert same(tensors(tmp_path / "out"), tensors(merge(tmp_path, ["task1", "task2"], "expected", kappa=0.8)))
    assert "spectral accumulation" in (tmp_path / "out" / "README.md").read_text()
    code, text = nufilt("merge", tmp_path / "out" / "nufilt.json", "--out", tmp_path / "again")
    assert code == 0, text
    assert hashes(tmp_path / "again")["model.safetensors.index.json"]
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
