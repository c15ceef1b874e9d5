"""The `nufilt merge` command: a merge said in a file, in words and in options."""

import re
from pathlib import Path

import pytest
import torch

from fusion_bench_nufilt.cli.merging import gather
from tests.cli.helpers import nufilt
from tests.merge.helpers import merge, same, save_stream, tensors
from tests.tiny_models import llama

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


def models(folder, tasks):
    """The words for the base and a number of tasks of a stream."""
    words = ["--base", folder / "base"]
    for number in range(1, tasks + 1):
        words += ["--task", folder / f"task{number}"]
    return words


def test_a_recipe_its_words_and_its_options_make_the_same_model_as_the_code(tmp_path):
    save_stream(tmp_path, llama())
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path))
    code, text = nufilt("merge", "null_rank=5", recipe, "max_steps=5", "--null-rank", 6)
    assert code == 0, text
    assert same(tensors(tmp_path / "recipe"), tensors(merge(tmp_path)))


def test_the_last_word_wins_and_values_are_what_yaml_would_make_of_them(tmp_path):
    recipe = tmp_path / "recipe=1.yaml"
    recipe.write_text(
        "{base: b, tasks: [one, two], out: o, settings: {null_rank: 1, lora_rank: 1, lr: 1e-3}}"
    )
    words = [
        str(recipe),
        "lora_rank=2",
        "lr=2e-3",
        "target_modules=[q_proj,up_proj]",
        "null_space=false",
        "tasks=three",
    ]
    assert gather(words, {"lr": 0.5, "out": "there"}, SETTINGS) == {
        "base": "b",
        "tasks": ["three"],
        "out": "there",
        "null_rank": 1,
        "lora_rank": 2,
        "lr": 0.5,
        "target_modules": ["q_proj", "up_proj"],
        "null_space": False,
    }


def refused(words):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        gather(words, {}, SETTINGS)
    return str(caught.value)


def test_what_is_no_recipe_is_refused():
    for words, message in (
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
    ):
        assert message in refused(words)


def test_what_is_no_recipe_is_refused_by_file_and_field(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    for content, field in (
        ("[base, out]", "valid dictionary"),
        ("3", "can't be read"),
        ("base: b: c", "can't be read"),
        ("base: [", "can't be read"),
        ("[" * 1000, "can't be read"),
        ("base: {}", "field 'base'"),
        ("tasks: 3", "field 'tasks'"),
        ("tasks: [a, {}]", "field 'tasks.1'"),
        ("merged: []", "field 'merged'"),
        ("out: 1.5", "field 'out'"),
        ("settings: [null_rank]", "field 'settings'"),
        ("settings: {method: {}}", "field 'method'"),
    ):
        recipe.write_text(content)
        message = refused([str(recipe)])
        assert field in message
        assert "recipe.yaml" in message
    for content, what in (
        ("1: 2", "no option '1'"),
        ("settings: {1: 2}", "no option '1'"),
        ("", "must be given"),
    ):
        recipe.write_text(content)
        assert what in refused([str(recipe)])


def test_a_recipe_may_have_anchors_and_a_word_be_longer_than_the_name_of_a_file(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("base: &name b\ntasks: [t, *name]\nout: o\n")
    modules = [f"layers.{number}.q_proj" for number in range(40)]
    gathered = gather([str(recipe), f"target_modules=[{','.join(modules)}]"], {}, SETTINGS)
    assert (gathered["tasks"], gathered["target_modules"]) == (["t", "b"], modules)


def test_the_manifest_of_a_result_is_no_recipe_and_its_card_has_one(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    made = merge(tmp_path, ["task1"], "made")
    message = refused([str(made / "nufilt.json")])
    assert message.endswith("it describes a result, in whose README.md is the recipe")


def test_a_dry_run_prints_the_plan_of_the_layers_that_words_choose_and_writes_nothing(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    before = sorted(tmp_path.rglob("*"))
    command = ("merge", *models(tmp_path, 1), "--out", tmp_path / "out", "--dry-run")
    code, text = nufilt(*command)
    assert code == 0
    for words in (
        "14 layers",
        "0 other tensors (other_params=pretrained)",
        "6 tensors, as the base has them",
        "GB at most",
    ):
        assert words in text
    assert re.search(r"disk 0\.[1-9] MB in ", text)  # and no tenth of a gigabyte
    targets = ("--target-modules", "q_proj", "--target-modules", "up_proj")
    _, text = nufilt(*command, *targets, "--exclude-modules", "0.self_attn.q_proj")
    assert "3 layers" in text
    _, text = nufilt(*command, "--target-modules", r".*v_proj")
    assert "2 layers" in text
    assert sorted(tmp_path.rglob("*")) == before


def test_weights_are_the_strengths_of_the_tasks_updates(tmp_path, monkeypatch):
    save_stream(tmp_path, llama(tie_word_embeddings=False), tasks=2)
    monkeypatch.chdir(tmp_path)
    command = ("merge", *models(Path(), 2), "--out", "out", "--method", "sum")
    code, text = nufilt(*command, "--weights", "0.5")
    assert code == 1, text
    assert "there are 1 weights for 2 tasks" in text
    code, text = nufilt(*command, "weights=0.5,2")
    assert code == 1
    assert "a list is in brackets: 'weights=[0.5,2]'" in text
    code, text = nufilt(*command, "weights=[0.5,2]", "scale=0.5")
    assert code == 0, text
    base = tensors(tmp_path / "base")
    task1 = tensors(tmp_path / "task1")
    task2 = tensors(tmp_path / "task2")
    for key, theta_0 in base.items():
        expected = theta_0 + 0.25 * (task1[key] - theta_0) + (task2[key] - theta_0)
        torch.testing.assert_close(tensors(tmp_path / "out")[key], expected, rtol=0, atol=2e-7)


def test_folders_without_options_are_said_to_need_them(tmp_path, monkeypatch):
    save_stream(tmp_path, llama(), tasks=2)
    monkeypatch.chdir(tmp_path)
    code, text = nufilt("analyze", "base", "task1", "task2")
    assert code == 1
    options = "--base base --task task1 --task task2"
    assert f"folders are named by options, {options}" in text
    code, text = nufilt("analyze", *options.split())
    assert code == 0, text
    code, text = nufilt("merge", "base", "task1", "task2")
    assert (code, "models are named by --base and --task" in text) == (1, True)
