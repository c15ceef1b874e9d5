"""A merge said in a file, in words and in options."""

import json
import shutil

import pytest

from fusion_bench_nufilt.commands.merge import gather, read_recipe
from tests.commands.helpers import nufilt
from tests.folders.helpers import hashes, merge, same, save_stream, tensors
from tests.models import llama

RECIPE = """
# Three tasks on a tiny Llama.
base: {folder}/base
tasks: [{folder}/task1, {folder}/task2, {folder}/task3]
out: {folder}/recipe
settings:
  null_rank: 6
  lora_rank: 4
  task_rank: 3
  max_steps: 99  # too many
  init_std: 2e-2
  max_memory: 100GB
"""
SETTINGS = ("null_rank", "lora_rank", "lr", "null_space", "target_modules")


def test_a_recipe_its_words_and_its_options_make_the_same_model_as_the_code(tmp_path):
    save_stream(tmp_path, llama())
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path))
    code, text = nufilt("merge", "null_rank=5", recipe, "max_steps=5", "--null-rank", 6)
    assert code == 0, text
    assert same(tensors(tmp_path / "recipe"), tensors(merge(tmp_path)))


@pytest.mark.parametrize("merged", [False, True])
def test_the_manifest_of_a_result_is_a_recipe_that_reproduces_it(tmp_path, merged):
    save_stream(tmp_path, llama(), tasks=2)
    if merged:
        merge(tmp_path, ["task1"], "one", null_space=False)
        made = merge(tmp_path, ["task2"], "made", merged="one", null_space=False, settings={"seed": 7})
    else:
        made = merge(tmp_path, ["task1", "task2"], "made", target_modules=["q_proj", "mlp"], other_params="mean")
    kept = shutil.move(made, tmp_path / "kept")
    code, text = nufilt("merge", kept / "nufilt.json", "--out", tmp_path / "made")
    assert code == 0, text
    assert hashes(tmp_path / "made") == hashes(kept)


def test_the_last_word_wins_and_values_are_what_yaml_would_make_of_them(tmp_path):
    recipe = tmp_path / "recipe=1.yaml"
    recipe.write_text("{base: b, tasks: [one, two], out: o, settings: {null_rank: 1, lora_rank: 1, lr: 1e-3}}")
    words = [str(recipe), "lora_rank=2", "lr=2e-3", "target_modules=[q_proj,mlp]", "null_space=false", "tasks=three"]
    found = gather(words, {"lr": 0.5, "out": "there"}, SETTINGS)
    assert found == {
        "base": "b",
        "tasks": ["three"],
        "out": "there",
        "null_rank": 1,
        "lora_rank": 2,
        "lr": 0.5,
        "target_modules": ["q_proj", "mlp"],
        "null_space": False,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--base and --task and --out must be given"),
        (("base=b", "tasks=[t]"), "--out must be given"),
        (("nul_rank=3",), "there is no option 'nul_rank'; did you mean 'null_rank'?"),
        (("absent.yaml",), "there is no recipe file 'absent.yaml'"),
        (("one.yaml", "two.yaml"), "one recipe file at a time"),
        (("null_rank=1,2",), "with one value"),
        (("+null_rank=1",), "with one value"),
        (("null_rank=[",), "is not of the form KEY=VALUE"),
        (("base=3",), "field 'base': input should be a valid string, got 3"),
        (("tasks=[a,3]",), "field 'tasks.1'"),
        (("method=[]",), "field 'method'"),
    ],
)
def test_what_is_no_recipe_is_refused(words, message):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        gather(words, {}, SETTINGS)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("[base, out]", "valid dictionary"),
        ("3", "can't be read"),
        ("base: b: c", "can't be read"),
        ("base: [", "can't be read"),
        ("base: ${x}", "can't be read"),
        ("[" * 400, "can't be read"),
        ("base: 3", "field 'base'"),
        ("base: {}", "field 'base'"),
        ("tasks: 3", "field 'tasks'"),
        ("tasks: [a, {}]", "field 'tasks.1'"),
        ("merged: []", "field 'merged'"),
        ("out: 1.5", "field 'out'"),
        ("method: []", "field 'method'"),
        ("settings: [null_rank]", "field 'settings'"),
        ("settings: {method: {}}", "field 'method'"),
        ("1: 2", "no option '1'"),
        ("settings: {1: 2}", "no option '1'"),
        ("", "must be given"),
    ],
)
def test_what_is_no_recipe_is_refused_by_file_and_field(tmp_path, content, field):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(content)
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        gather([str(recipe)], {}, SETTINGS)
    assert field in str(caught.value)
    if "option" not in field and "given" not in field:
        assert "recipe.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({"inputs": {"base": {}}}, "field 'inputs.base.name'"),
        ({"inputs": {}, "step": 1}, "field 'inputs.base'"),
        ({"inputs": [], "step": 1}, "field 'inputs'"),
        ({"inputs": {"base": "b"}, "step": 1}, "field 'inputs.base'"),
        ({"inputs": {"base": {"name": 3}}, "step": 1}, "field 'inputs.base.name'"),
        ({"inputs": {"base": {"name": "b"}, "task 0": {}}, "step": 1}, "field 'inputs.task 0.name'"),
        ({"inputs": {"base": {"name": "b"}}}, "field 'step'"),
        ({"inputs": {"base": {"name": "b"}}, "step": "1"}, "field 'step'"),
        ({"inputs": {"base": {"name": "b"}}, "step": True}, "field 'step'"),
        ({"inputs": {"base": {"name": "b"}}, "step": 1, "settings": []}, "field 'settings'"),
    ],
)
def test_a_manifest_that_does_not_say_how_to_make_the_result_is_refused_by_file_and_field(tmp_path, content, field):
    manifest = tmp_path / "nufilt.json"
    manifest.write_text(json.dumps(content))
    code, text = nufilt("merge", manifest, "--out", tmp_path / "out")
    assert (code, "Traceback" in text) == (1, False)
    assert f"{field}: " in text
    assert "nufilt.json" in text


def test_the_tasks_of_a_manifest_are_in_the_order_of_their_numbers(tmp_path):
    inputs = {f"task {number}": {"name": f"t{number}"} for number in (10, 2, 0)}
    content = {"inputs": {**inputs, "base": {"name": "b"}}, "step": 5}
    (tmp_path / "nufilt.json").write_text(json.dumps(content))
    assert read_recipe(tmp_path / "nufilt.json") == {"base": "b", "tasks": ["t0", "t2", "t10"], "step": 3}


def test_the_manifest_of_another_program_is_no_recipe(tmp_path):
    (tmp_path / "nufilt.json").write_text(json.dumps({"step": 1, "tasks": ["a"], "files": {}}))
    code, text = nufilt("merge", tmp_path / "nufilt.json")
    assert (code, "there is no option 'files'" in text) == (1, True)
