"""A merge goes on from what was saved, by the same method from the same base, or says what is
another.
"""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.methods import METHODS, ORDER_FREE
from fusion_bench_nufilt.utils.manifest import state_key
from tests.continual.helpers import InterruptedRunError, interrupt_after, logging_to
from tests.merge.helpers import (
    RANKS,
    STATE,
    algorithm,
    change,
    change_json,
    manifest,
    merge,
    plan,
    same,
    save_merged_adapters,
    tensors,
)
from tests.models.test_adapters import random_adapter
from tests.tiny_models import finetuned

LAYER = "model.layers.0.mlp.up_proj"


def change_state(folder, **tensors):
    state = load_file(folder / STATE)
    for name, function in tensors.items():
        key = state_key(LAYER, name)
        state[key] = function(state[key])
    save_file(state, folder / STATE)


def change_within_rounding(folder):
    change(folder, f"{LAYER}.weight", lambda weight: weight * (1 + 1e-7))


CHANGES = {
    "another configuration": lambda one: change_json(one / "config.json", rope_theta=1e6),
    "other files": lambda one: change_json(one / "nufilt.json", files={}),
    "negative votes": lambda one: change_state(one, votes=torch.neg),
    "a doubled count": lambda one: change_state(one, count=lambda count: 2 * count),
    "a weight within rounding": change_within_rounding,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_since_it_was_saved_is_refused_unless_the_user_knows(stream, name):
    one = merge(stream, ["task1"], "one", method="spectral")
    plan(stream, ["task2"], "one", method="spectral")
    CHANGES[name](one)
    message = r"one.* is not what was saved \(its (size|sha256) differs\).*--no-verify"
    if name == "other files":
        message = r"one.*nufilt\.json does not list .*--no-verify"
    with pytest.raises(ValueError, match=message):
        plan(stream, ["task2"], "one", method="spectral")
    plan(stream, ["task2"], "one", method="spectral", settings={"verify": False})


def test_without_digests_it_is_said_that_an_edited_configuration_is_not_in_the_result(stream):
    one = merge(stream, ["task1"], "one")
    files = ["config.json", "generation_config.json"]
    for file in files:
        change_json(one / file, rope_theta=1e6)
    out = merge(stream, ["task2"], merged="one", settings={"verify": False})
    for file, warning in zip(files, manifest(out)["warnings"], strict=True):
        assert f"'one': {file} is not what was saved" in warning
        assert "configurations in the result are the base's" in warning
    assert (out / "config.json").read_bytes() == (stream / "base" / "config.json").read_bytes()


def test_the_card_of_what_is_gone_on_from_may_be_edited(stream):
    one = merge(stream, ["task1"], "one")
    (one / "README.md").write_text("# My model")
    assert plan(stream, ["task2"], "one").warnings == []


@pytest.mark.parametrize("kind", [METHODS[name] for name in ORDER_FREE], ids=ORDER_FREE)
def test_another_strength_from_the_middle_on_is_that_strength_for_all_tasks(stream, kind):
    options = {}
    for field in dataclasses.fields(kind.Options):
        if isinstance(field.default, float):
            options[field.name] = field.default * 1.1 + 0.1
    merge(stream, ["task1", "task2"], "two", method=kind.name)
    on = merge(stream, ["task3"], "on", merged="two", method=kind.name, **options)
    assert same(tensors(on), tensors(merge(stream, method=kind.name, **options)))


def test_without_a_state_the_model_is_the_same_and_ends_its_stream(stream):
    whole = merge(stream, ["task1", "task2"], "whole", method="best")
    last = merge(stream, ["task1", "task2"], "last", method="best", settings={"state": False})
    assert same(tensors(last), tensors(whole))
    assert not (last / STATE).exists()
    assert manifest(last)["settings"]["state"] is False
    message = r"last. has no .* of the same layers only, without --no-state; merge its tasks again"
    with pytest.raises(ValueError, match=message):
        plan(stream, ["task3"], "last", method="best")
    end = merge(stream, ["task3"], "end", merged="whole", method="best", settings={"state": False})
    assert same(tensors(end), tensors(merge(stream, method="best")))


def test_a_state_whose_directions_are_in_float32_is_refused(stream):
    one = merge(stream, ["task1"], "one", method="best")
    state = load_file(one / STATE)
    directions = [key for key, value in state.items() if value.dtype == torch.float16]
    assert len(directions) == 28
    save_file(state | {key: state[key].float() for key in directions}, one / STATE)
    with pytest.raises(ValueError, match=r"F32 .* is not F16"):
        merge(stream, ["task2"], "on", merged="one", method="best", settings={"verify": False})


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_tasks_in_16_bits_are_merged_one_by_one_into_a_base_in_float32_as_all_at_once(
    tmp_path, scale
):
    """The base and the merged model do not tell in how many digits a task was stored: the filter
    protected the rounding of earlier ones.
    """
    save_merged_adapters(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    options = {"target_modules": "all-linear", "null_rank": 48}
    both = {"weights": [scale, scale]}
    at_once = merge(tmp_path, ["task1", "task2"], "at once", settings=both, **options)
    alone = {"weights": [scale]}
    merge(tmp_path, ["task1"], "one", settings=alone, **options)
    one_by_one = merge(tmp_path, ["task2"], "one by one", "one", settings=alone, **options)
    (report,) = manifest(one_by_one)["layers"][LAYER]
    assert report["protected_rank"] == 2
    for name, weight in tensors(at_once).items():
        assert torch.allclose(tensors(one_by_one)[name], weight, rtol=1e-5, atol=1e-7), name


def test_what_rounding_has_added_is_as_earlier_merges_recorded_it(tmp_path):
    """A base in 16 bits does not tell that a task was in float32: its faintest directions count."""
    save_merged_adapters(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    finetuned(base, seed=1, scale=1e-6).save_pretrained(tmp_path / "faint")
    options = {"settings": {"dtype": "float32"}, "target_modules": "all-linear", "null_rank": 48}
    merge(tmp_path, ["faint"], "one", **options)
    both = merge(tmp_path, ["task2"], "both", "one", **options)
    (report,) = manifest(both)["layers"][LAYER]
    assert report["protected_rank"] == 48


@pytest.mark.parametrize("kind", ["adapter", "wide"])
def test_a_model_that_was_rounded_to_bfloat16_has_rounding_though_its_tasks_have_none(
    tmp_path, kind
):
    """The filter protected what the model's rounding had left of an adapter, or of a model in
    float32: a third of the next update was another.
    """
    save_merged_adapters(tmp_path)
    for seed in (1, 2):
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        lora = {"r": 2, "target_modules": "all-linear"}
        random_adapter(tmp_path / f"adapter{seed}", tmp_path / f"merged{seed}", base, seed, **lora)
    first, second = f"{kind}1", f"{kind}2"
    options = {"target_modules": "all-linear", "null_rank": 48}
    at_once = merge(tmp_path, [first, second], "at once", **options)
    merge(tmp_path, [first], "one", **options)
    one_by_one = merge(tmp_path, [second], "one by one", "one", **options)
    (report,) = manifest(one_by_one)["layers"][LAYER]
    assert report["protected_rank"] == 2
    base, expected = tensors(tmp_path / "base"), tensors(at_once)
    for name, weight in tensors(one_by_one).items():
        error = (weight.float() - expected[name].float()).norm()
        assert error <= 0.05 * (expected[name].float() - base[name].float()).norm(), name


def test_a_run_in_float32_knows_the_digits_of_its_earlier_tasks_also_where_it_goes_on(tmp_path):
    save_merged_adapters(tmp_path)
    names = {"_pretrained_": "base", "task1": "task1", "task2": "task2"}
    models = {}
    for name, folder in names.items():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32)
        models[name] = model
    models["_pretrained_"].save_pretrained(tmp_path / "base")
    options = {"target_modules": "all-linear", "null_rank": 48}
    in_memory = algorithm(models, **options).state_dict()
    settings = {**RANKS, "shuffle_order": False, **options}
    begun = logging_to(tmp_path / "run", NufiltContinualMergingAlgorithm(**settings))
    with pytest.raises(InterruptedRunError):
        begun.run(models, on_step=interrupt_after(1))
    resumed = NufiltContinualMergingAlgorithm(**settings)
    gone_on = logging_to(tmp_path / "run", resumed).run(models).state_dict()
    from_folders = tensors(merge(tmp_path, ["task1", "task2"], **options))
    for name, weight in from_folders.items():
        assert torch.equal(in_memory[name], weight), name
        assert torch.equal(gone_on[name], weight), name
