"""What a merge says before any work."""

import re
import shutil
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fusion_bench_nufilt.merge import merge_folders
from fusion_bench_nufilt.merge.checks import kept_from_base
from fusion_bench_nufilt.models.fit import check_module
from fusion_bench_nufilt.models.peft_layers import PREFIX
from tests.cli.helpers import nufilt
from tests.docs import follow_renaming
from tests.merge.helpers import (
    RANKS,
    change,
    change_json,
    merge,
    plan,
    rename,
    rewrite,
    same,
    save_stream,
    tensors,
)
from tests.models.test_adapters import save_adapter
from tests.tiny_models import clip, llama


def test_the_plan_names_the_tensors_whose_changes_are_left_out_and_what_averages_them(stream):
    words = [f"{key}={value}" for key, value in RANKS.items()]
    models = ["--base", stream / "base", "--task", stream / "task1", "--out", stream / "out"]
    code, text = nufilt("merge", *models, *words, "--dry-run")
    assert code == 0, text
    assert "whatever a task changed in 6 tensors is left out: 'model.embed_tokens.weight'," in text
    assert "and 2 more; other_params=mean averages them" in text
    code, text = nufilt("merge", *models, *words, "other_params=mean", "--dry-run")
    assert code == 0, text
    assert "left out" not in text


def test_a_damaged_manifest_is_not_said_to_pass_unverified(stream):
    merge(stream, ["task1"], "one")
    (stream / "one" / "nufilt.json").write_text("{")
    with pytest.raises(ValueError, match=r"nufilt.json' is damaged, .*; merge or fetch it again$"):
        plan(stream, ["task2"], merged="one", settings={"verify": False})


def move_far(folder, tasks=("task1", "task2", "task3")):
    """Give tasks updates as large as the base."""
    for task in tasks:
        for layer in range(2):
            key = f"model.layers.{layer}.mlp.up_proj.weight"
            change(folder / task, key, lambda value: value + value.std())


def test_the_state_beside_a_result_far_from_its_base_is_not_suspected_to_be_of_another(tmp_path):
    save_stream(tmp_path, llama(), dtype=torch.bfloat16)
    move_far(tmp_path, ["task1", "task2"])
    options = {"target_modules": ["up_proj"], "settings": {"state": True}}
    merge(tmp_path, ["task1", "task2"], "far", **options)
    assert plan(tmp_path, ["task3"], merged="far", **options).warnings == []


@pytest.mark.parametrize("role", ["task", "merged"])
def test_a_result_far_from_its_base_is_not_suspected_to_be_of_another(stream, role):
    move_far(stream)
    options = {"method": "sum", "scale": 1.0, "target_modules": ["up_proj"]}
    merge(stream, ["task1", "task2"], "far", **options)
    if role == "task":
        warnings = plan(stream, ["far"], **options).warnings
    else:
        warnings = plan(stream, ["task3"], merged="far", **options).warnings
    assert not any("far' looks as if it was made from another" in text for text in warnings)
    shutil.copytree(stream / "far", stream / "unknown")
    (stream / "unknown" / "nufilt.json").unlink()
    warnings = plan(stream, ["unknown"], **options).warnings
    assert any("unknown' looks as if it was made from another" in text for text in warnings)


# --- names that a wrapper for training left ---

#: Each makes a plain name into the one that a wrapper leaves.
WRAPPERS = {
    "module.": partial(re.sub, r"^", "module."),
    "_orig_mod.": partial(re.sub, r"^", "_orig_mod."),
    "_orig_mod. of every block": partial(re.sub, r"(layers\.\d+\.)", r"\1_orig_mod."),
    "_fsdp_wrapped_module.": partial(re.sub, r"layers\.", "layers._fsdp_wrapped_module."),
    "_checkpoint_wrapped_module.": partial(re.sub, r"mlp\.", "_checkpoint_wrapped_module.mlp."),
}


@pytest.mark.parametrize(
    ("wrapper", "model"),
    [
        ("module.", "base"),
        ("_orig_mod.", "adapter"),
        ("_orig_mod. of every block", "task1"),
        ("_fsdp_wrapped_module.", "adapter"),
        ("_checkpoint_wrapped_module.", "base"),
    ],
)
def test_the_wrapper_that_a_model_was_saved_from_is_named_with_what_takes_it_out(
    tmp_path, wrapper, model
):
    models = save_stream(tmp_path, llama(), tasks=1)
    save_adapter(tmp_path, models["_pretrained_"])
    tasks = ["task1"]
    if model == "adapter":
        tasks = ["adapter"]
    expected = tensors(merge(tmp_path, tasks, "expected"))
    wrap = WRAPPERS[wrapper]
    if model == "adapter" and wrapper.startswith("_orig_mod."):  # compiled before peft
        rename(tmp_path / model, lambda key: PREFIX + wrap(key.removeprefix(PREFIX)))
    else:
        rename(tmp_path / model, wrap)
    name = wrapper.partition(".")[0]
    message = f"{model}' was saved from the wrapper of .*'{name}"
    with pytest.raises(ValueError, match=message) as error:
        plan(tmp_path, tasks)
    follow_renaming(str(error.value))
    assert same(tensors(merge(tmp_path, tasks)), expected)


OTHER_NAMES = {
    "a prefix more": lambda key: key.replace("model.", "model.language_model.language_model."),
    "a prefix less": lambda key: key.removeprefix("model."),
}


@pytest.mark.parametrize("names", OTHER_NAMES)
def test_layers_under_other_names_are_to_be_renamed_and_not_to_be_left_out(tmp_path, names):
    prefix = ""
    if names == "a prefix less":
        prefix = "language."
    save_stream(tmp_path, llama(), tasks=1)
    for name in ("base", "task1"):
        rename(tmp_path / name, lambda key: prefix + key)
        (tmp_path / name / "config.json").unlink()
    expected = tensors(merge(tmp_path, ["task1"], "expected"))
    other_names = {key: OTHER_NAMES[names](key.removeprefix(prefix)) for key in expected}
    rename(tmp_path / "task1", other_names.get)
    message = r"lacks '.*' .*: it has '.*', .* rename them as the base's are$"
    with pytest.raises(ValueError, match=message):
        plan(tmp_path, ["task1"])
    base_names = {other: key for key, other in other_names.items()}
    rename(tmp_path / "task1", base_names.get)
    assert same(tensors(merge(tmp_path, ["task1"])), expected)


@pytest.mark.parametrize("role", ["base", "task1"])
def test_a_model_that_holds_an_adapter_of_peft_is_to_be_saved_after_its_merge(tmp_path, role):
    save_stream(tmp_path, llama(), tasks=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / role)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    state = {key.removeprefix(PREFIX): value for key, value in adapted.state_dict().items()}
    del state["lm_head.weight"]
    for file in (tmp_path / role).glob("*.safetensors*"):
        file.unlink()
    save_file(state, tmp_path / role / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{role}' was saved from a model of peft, .*_unload") as e:
        plan(tmp_path, ["task1"])
    assert "leaves it out" not in str(e.value)
    adapted.merge_and_unload().save_pretrained(tmp_path / role)
    merge(tmp_path, ["task1"])


def test_a_base_and_tasks_that_are_all_named_alike_are_merged_as_they_are(stream):
    expected = tensors(merge(stream, out="expected"))
    for model in ("base", "task1", "task2", "task3"):
        rename(stream / model, WRAPPERS["module."])
        (stream / model / "config.json").unlink()
    result = tensors(merge(stream))
    assert result.keys() == {f"module.{key}" for key in expected}


@pytest.mark.parametrize("renamed", [".*", "model.*"])
def test_a_model_merged_so_far_that_has_no_layer_of_the_base_is_refused(stream, renamed):
    """It is no part of the base, whose other parts would be taken for unchanged."""
    merge(stream, ["task1"], "one")
    rename(stream / "one", lambda key: f"x.{key}" if re.fullmatch(renamed, key) else key)
    with pytest.raises(ValueError, match=r"one' lacks '.*: it was not made from this base"):
        plan(stream, ["task2"], merged="one", settings={"verify": False})


def test_a_model_in_memory_is_to_be_given_without_its_wrapper():
    with pytest.raises(ValueError, match=r"svhn' was saved from the wrapper of Distr.*is inside"):
        check_module(clip(), torch.nn.DataParallel(clip()), "svhn")


# --- buffers ---


def add_buffers(folder, value=1.0):
    """Store what older versions of transformers stored of a Llama, and the positions of a CLIP."""
    file = max(folder.glob("*.safetensors"))
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((4,), value),
        "model.embeddings.position_ids": torch.arange(5),
    }
    save_file({**load_file(file), **buffers}, file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    return buffers


@pytest.mark.parametrize("other_params", ["mean", "pretrained"])
@pytest.mark.parametrize("models", [("base", "task1", "task2"), ("base",), ("task1",)])
def test_buffers_are_neither_left_out_nor_lost_nor_averaged(tmp_path, models, other_params):
    save_stream(tmp_path, llama(), tasks=2, shards="1GB")
    for number, model in enumerate(models):
        buffers = add_buffers(tmp_path / model, value=1.0 + number)
    planned = plan(tmp_path, ["task1", "task2"], other_params=other_params)
    assert planned.warnings == []
    kept = kept_from_base(planned)
    assert kept == [] or other_params == "pretrained"
    assert not {"inv_freq", "position_ids"} & {param.rpartition(".")[2] for param in kept}
    out = tensors(merge_folders(planned, tmp_path / "out"))
    base = tensors(tmp_path / "base")
    assert out.keys() == base.keys()
    for key in buffers.keys() & base.keys():
        assert torch.equal(out[key], base[key])


def test_a_result_without_the_buffers_of_its_base_is_gone_on_from(tmp_path):
    save_stream(tmp_path, llama(), tasks=2, shards="1GB")
    one = merge(tmp_path, ["task1"], "one")
    expected = tensors(merge(tmp_path, ["task2"], "two", merged="one"))
    (one / "nufilt.json").unlink()
    buffers = add_buffers(tmp_path / "base")
    settings = {"step": 2}
    out = tensors(merge(tmp_path, ["task2"], merged="one", settings=settings))
    assert same(out, {**expected, **buffers})


def test_a_result_with_whole_numbers_is_gone_on_from(tmp_path):
    save_stream(tmp_path, llama(), tasks=2, shards="1GB")
    for name in ("base", "task1", "task2"):
        buffers = add_buffers(tmp_path / name)
    at_once = tensors(merge(tmp_path, ["task1", "task2"], "at_once"))
    merge(tmp_path, ["task1"], "one")
    out = tensors(merge(tmp_path, ["task2"], merged="one"))
    assert buffers.keys() < out.keys()
    assert same(out, at_once)


# --- the base that an adapter names ---


@pytest.mark.parametrize(
    ("trained_on", "given"),
    [
        ("meta-llama/Llama-2-7b-hf", "Llama-2-7b-hf"),
        ("unsloth/llama-3-8b-unsloth-bnb-4bit", "Llama-3-8B"),
        ("/cache/models--owner--some-base/snapshots/0123abc", "some-base"),
        ("C:\\models\\base\\", "base"),
    ],
)
def test_the_base_that_an_adapter_names_may_be_anywhere_but_is_the_one_that_is_given(
    tmp_path, trained_on, given
):
    models = save_stream(tmp_path, llama(), tasks=1)
    save_adapter(tmp_path, models["_pretrained_"])
    (tmp_path / "base").rename(tmp_path / given)
    change_json(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=trained_on)
    assert plan(tmp_path, ["adapter"], base=given).warnings == []
    shutil.move(tmp_path / given, tmp_path / "another")
    (text,) = plan(tmp_path, ["adapter"], base="another").warnings
    assert f"adapter' was trained on '{trained_on}', and the base given is '" in text
    change_json(tmp_path / "another" / "config.json", _name_or_path=f"owner/{given}")
    assert plan(tmp_path, ["adapter"], base="another").warnings == []


@pytest.mark.parametrize("scale", [0.0, 0.02, 1.0])
def test_a_layer_that_an_adapter_holds_in_full_does_not_tell_of_which_base_it_is(tmp_path, scale):
    base = llama()
    base.save_pretrained(tmp_path / "base")
    values = {PREFIX + name: value.clone() for name, value in base.state_dict().items()}
    save_adapter(tmp_path, base, target_modules=["q_proj"], modules_to_save=["up_proj"])

    def train(state):
        for key in filter(values.__contains__, state):
            state[key] = values[key] + scale * torch.randn_like(values[key])
        return state

    rewrite(tmp_path / "adapter", train)
    planned = plan(tmp_path, ["adapter"], method="sum", target_modules="all-linear")
    assert [warning for warning in planned.warnings if "layers" in warning] == []


def test_a_folder_of_somebodys_is_not_said_to_be_removed(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    planned = plan(tmp_path, ["task1"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_text("somebody's")
    with pytest.raises(ValueError, match=r"out' exists: name another folder$"):
        merge_folders(planned, tmp_path / "out")
    merge_folders(planned, tmp_path / "another")
