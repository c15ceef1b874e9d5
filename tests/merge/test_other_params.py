"""A mean counts the models that have the tensor, whatever the order, and the manifest keeps the
count; in a lower precision it goes on from the state, so that it is rounded once.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.utils.manifest import state_key
from tests.continual.helpers import InterruptedRunError, interrupt_after, logging_to
from tests.merge.helpers import (
    RANKS,
    STATE,
    change,
    hashes,
    interrupt,
    manifest,
    merge,
    plan,
    pool,
    same,
    save_stream,
    tensors,
)
from tests.tiny_models import llama

NORM = "model.norm.weight"
OPTIONS = {"other_params": "mean"}


@pytest.fixture
def stream(stream):
    """A stream whose second task lacks a norm."""
    change(stream / "task2", NORM, lambda value: None)
    return stream


@pytest.mark.parametrize("order", [("task1", "task2"), ("task2", "task1")])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_tensor_that_a_model_lacks_does_not_count_in_the_mean(stream, order, at_once):
    if at_once:
        out = merge(stream, order, **OPTIONS)
    else:
        merge(stream, order[:1], "first", **OPTIONS)
        out = merge(stream, order[1:], merged="first", **OPTIONS)
    assert torch.equal(norm(out), norm(stream / "task1"))
    assert manifest(out)["mean_counts"] == {NORM: 1}
    last = merge(stream, ["task3"], "last", merged="out", **OPTIONS)
    expected = torch.lerp(norm(stream / "task1"), norm(stream / "task3"), 0.5)
    assert torch.equal(norm(last), expected)
    assert manifest(last)["mean_counts"] == {NORM: 2}


def test_until_a_model_has_the_tensor_the_mean_is_the_bases(stream):
    out = merge(stream, ["task2"], **OPTIONS)
    assert torch.equal(norm(out), norm(stream / "base"))
    assert manifest(out)["mean_counts"] == {NORM: 0}


def test_a_manifest_without_counts_counts_every_step(stream):
    out = merge(stream, ["task1", "task2"], **OPTIONS)
    content = manifest(out)
    del content["mean_counts"]
    (out / "nufilt.json").write_text(json.dumps(content))
    last = merge(stream, ["task3"], "last", merged="out", settings={"verify": False}, **OPTIONS)
    expected = torch.lerp(norm(stream / "task1"), norm(stream / "task3"), 1 / 3)
    assert torch.equal(norm(last), expected)
    assert manifest(last)["mean_counts"] == {}


FEW = {"target_modules": ["k_proj"], "other_params": "mean"}
TASKS = [f"task{i}" for i in range(1, 6)]
REST = {"_pretrained_": "base", "task4": "task4", "task5": "task5"}


def norm(folder):
    return tensors(folder)[NORM]


def test_the_first_tasks_tensors_count_one_model_at_once_and_one_at_a_time(stream):
    first = {**FEW, "other_params": "first"}
    counts = manifest(merge(stream, **first))["mean_counts"]
    assert counts[NORM] == 1
    merge(stream, ["task1"], "one", **first)
    merge(stream, ["task2"], "two", merged="one", **first)
    last = merge(stream, ["task3"], "three", merged="two", **first)
    assert manifest(last)["mean_counts"] == counts


def test_a_mean_that_a_merge_leaves_as_it_is_counts_the_models_that_it_has(stream):
    few = {"target_modules": ["k_proj"]}
    merge(stream, ["task1"], "one", other_params="first", **few)
    merge(stream, ["task2"], "two", merged="one", other_params="first", **few)
    last = merge(stream, ["task3"], "three", merged="two", other_params="mean", **few)
    expected = torch.lerp(norm(stream / "task1"), norm(stream / "task3"), 0.5)
    assert torch.equal(norm(last), expected)


@pytest.fixture
def narrow(tmp_path):
    """Five tasks in bfloat16, whose updates of the norms are a few of its roundings."""
    models = save_stream(tmp_path, llama(), tasks=5, dtype=torch.bfloat16)
    return tmp_path, models


def one_at_a_time(folder, tasks, **options):
    merged = None
    for task in tasks:
        out = f"up_to_{task}"
        merge(folder, [task], out, merged, **options)
        merged = out
    return folder / out


def algorithm(method, **options):
    if method == "nufilt":
        options = {**RANKS, **options}
    return LayerwiseMergingAlgorithm(method, shuffle_order=False, **FEW, **options)


def others(state):
    return {key: value for key, value in state.items() if "k_proj" not in key}


@pytest.mark.parametrize(("method", "state"), [("nufilt", True), ("sum", None)])
def test_means_one_at_a_time_are_those_at_once_which_are_the_exact_ones_rounded_once(
    narrow, method, state
):
    folder, models = narrow
    options = {**FEW, "method": method, "settings": {"state": state}}
    last = one_at_a_time(folder, TASKS, **options)
    at_once = merge(folder, TASKS, "at_once", **options)
    assert same(tensors(last), tensors(at_once))
    assert same(load_file(last / STATE), load_file(at_once / STATE))
    assert manifest(last)["warnings"] == []
    means = load_file(last / STATE)
    weights = tensors(last)
    for key in others(weights):
        exact = torch.stack([models[task].state_dict()[key].double() for task in TASKS]).mean(0)
        torch.testing.assert_close(means[state_key(key)].double(), exact, rtol=1e-6, atol=1e-7)
        assert torch.equal(weights[key], means[state_key(key)].bfloat16())


@pytest.mark.parametrize("method", ["nufilt", "sum"])
def test_a_run_of_fusion_bench_has_the_means_of_the_folders_in_one_piece_or_in_two(narrow, method):
    folder, models = narrow
    merge(folder, TASKS, "at_once", method=method, **FEW)
    at_once = LlamaForCausalLM.from_pretrained(folder / "at_once", dtype=torch.bfloat16)
    expected = at_once.state_dict()
    whole = algorithm(method).run(models)
    assert same(whole.state_dict(), expected)
    # Interrupted and resumed.
    run = folder / "run"
    with pytest.raises(InterruptedRunError):
        logging_to(run, algorithm(method)).run(models, on_step=interrupt_after(3))
    resumed = logging_to(run, algorithm(method)).run(models)
    assert same(resumed.state_dict(), expected)
    # A run on top of a run, and a merge of folders on top of a run.
    step = run / "checkpoints" / "merged_model_2"
    step.rename(folder / "three")
    rest = pool(folder, LlamaForCausalLM, torch.bfloat16, _merged_="three", **REST)
    assert same(algorithm(method).run(rest).state_dict(), expected)
    out = merge(folder, TASKS[3:], "on_top", "three", method=method, **FEW)
    assert manifest(out)["warnings"] == []
    assert same(tensors(out), tensors(folder / "at_once"))


@pytest.mark.parametrize("method", ["nufilt", "sum"])
def test_a_run_goes_on_from_the_state_of_folders(narrow, method):
    folder, _ = narrow
    options = {**FEW, "method": method, "settings": {"state": True}}
    expected = merge(folder, TASKS, "at_once", **options)
    merge(folder, TASKS[:3], "three", **options)
    run = logging_to(folder / "run", algorithm(method))
    merged = run.run(pool(folder, LlamaForCausalLM, torch.bfloat16, _merged_="three", **REST))
    loaded = LlamaForCausalLM.from_pretrained(expected, dtype=torch.bfloat16)
    assert same(merged.state_dict(), loaded.state_dict())
    saved = folder / "run" / "checkpoints" / "merged_model_4" / STATE
    assert same(load_file(saved), load_file(expected / STATE))
    # Loaded in float32, the models need no state to go on exactly, once that was read.
    run = logging_to(folder / "wide", algorithm(method))
    merged = run.run(pool(folder, LlamaForCausalLM, _merged_="three", **REST))
    wide = merge(folder, TASKS, "wide_folder", method=method, **FEW, settings={"dtype": "float32"})
    loaded = LlamaForCausalLM.from_pretrained(wide, dtype=torch.float32)
    torch.testing.assert_close(merged.state_dict(), loaded.state_dict(), rtol=0, atol=1e-6)
    saved = folder / "wide" / "checkpoints" / "merged_model_4" / STATE
    assert saved.is_file() == (method == "sum")


def test_without_the_state_of_a_mean_the_plan_says_once_that_it_goes_on_rounded(narrow):
    folder, _ = narrow
    merge(folder, TASKS[:1], "one", **FEW)
    assert manifest(folder / "one")["warnings"] == []
    (warning,) = plan(folder, TASKS[1:2], "one", **FEW).warnings
    assert "does not have the means of" in warning
    # What the warning names as the remedy ends it.
    merge(folder, TASKS[:1], "kept", settings={"state": True}, **FEW)
    assert plan(folder, TASKS[1:2], "kept", settings={"state": True}, **FEW).warnings == []


def test_a_mean_in_the_state_that_the_model_beside_it_does_not_have_is_refused(narrow):
    folder, _ = narrow
    options = {**FEW, "settings": {"state": True, "verify": False}}
    merge(folder, TASKS[:1], "one", **options)
    change(folder / "one", NORM, lambda value: value * 2)
    with pytest.raises(ValueError, match=f"does not belong to the weights beside it: '{NORM}'"):
        merge(folder, TASKS[1:2], "two", "one", **options)


def test_an_interrupted_merge_that_keeps_means_goes_on_to_the_same_files(narrow):
    folder, _ = narrow
    options = {**FEW, "tasks": TASKS[:2], "settings": {"state": True}}
    expected = hashes(merge(folder, out="expected", **options))
    assert interrupt(folder, after=9, **options) >= 9
    assert hashes(merge(folder, **options)) == expected
