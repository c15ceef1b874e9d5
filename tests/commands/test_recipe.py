"""A merge said in a file, in words and in options."""

import json
import shutil

import pytest

from fusion_bench_nufilt.commands.recipe import gather
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
    ],
)
def test_what_is_no_recipe_is_refused(words, message):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        gather(words, {}, SETTINGS)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", ["[base, out]", "base: b: c", "settings: [null_rank]", "", "base: [", "base: ${x}"])
def test_a_file_that_is_no_recipe_is_refused_by_name(tmp_path, content):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(content)
    code, text = nufilt("merge", recipe, "--dry-run")
    assert (code, "Traceback" in text) == (1, False)
    assert "recipe.yaml" in text or "must be given" in text


def test_the_manifest_of_another_program_is_no_recipe(tmp_path):
    (tmp_path / "nufilt.json").write_text(json.dumps({"step": 1, "tasks": ["a"], "files": {}}))
    code, text = nufilt("merge", tmp_path / "nufilt.json")
    assert (code, "there is no option 'step'" in text or "there is no option 'files'" in text) == (1, True)
