"""`nufilt merge --merged OUT --task NEW`: what is not said is as it was."""

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.cli.merging import settings_to_continue
from tests.cli.helpers import nufilt
from tests.continual.helpers import logging_to, pool, saved_pool
from tests.merge.helpers import (
    RANKS,
    change_json,
    manifest,
    merge,
    same,
    save_stream,
    tensors,
)
from tests.tiny_models import clip, llama

BEFORE = {**RANKS, "target_modules": ["q_proj", "up_proj"], "other_params": "mean"}
SETTINGS = {"seed": 7, "state": True}


def go_on(folder, *words):
    models = ("--merged", folder / "one", "--task", folder / "task2")
    return nufilt("merge", *models, "--out", folder / "new", *words)


def test_base_method_and_settings_are_those_of_the_model_that_it_goes_on_from(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    merge(tmp_path, ["task1"], "one", settings=SETTINGS, **BEFORE)
    expected = merge(tmp_path, ["task2"], "two", merged="one", settings=SETTINGS, **BEFORE)
    code, text = go_on(tmp_path)
    assert code == 0, text
    assert same(tensors(tmp_path / "new"), tensors(expected))
    assert manifest(tmp_path / "new")["settings"] == manifest(expected)["settings"]
    assert "warning" not in text
    taken_over = text.partition("taken over")[2].partition("step 2")[0]
    for words in ("null_rank 6", "target_modules ['q_proj', 'up_proj']", "seed 7", "state True"):
        assert words in taken_over
    for default in ("lr 0.001", "solver"):
        assert default not in taken_over


def test_what_the_user_says_wins_with_a_warning_that_names_both_values(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    merge(tmp_path, ["task1"], "one")
    code, text = go_on(tmp_path, "--null-rank", 4, "lora_rank=3")
    assert code == 0, text
    assert "one' was made with: null_rank is 6 there and 4 here; lora_rank is 4 there and 3" in text
    assert "task_rank 3, max_steps 5" in text
    expected = merge(tmp_path, ["task2"], "two", merged="one", null_rank=4, lora_rank=3)
    assert same(tensors(tmp_path / "new"), tensors(expected))


def test_another_method_takes_over_no_options_of_the_one_before(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    merge(tmp_path, ["task1"], "one", method="sum", scale=0.7, settings={"seed": 7})
    code, text = go_on(tmp_path, "--method", "nufilt", "--dry-run")
    assert code == 0, text
    assert 'method is "sum" there and "nufilt" here' in text
    assert "taken over target_modules all-linear, other_params mean, seed 7" in text
    code, text = go_on(tmp_path, "--dry-run")
    assert code == 0, text
    assert "taken over method sum, scale 0.7, seed 7" in text


def test_the_base_of_a_run_is_that_of_its_pool_wherever_the_step_lies(tmp_path):
    modelpool = saved_pool(tmp_path, pool(tasks=2))
    logging_to(tmp_path / "log", NufiltContinualMergingAlgorithm(**RANKS)).run(modelpool)
    step = tmp_path / "elsewhere" / "step"
    step.parent.mkdir()
    (tmp_path / "log" / "checkpoints" / "merged_model_0").rename(step)
    words = ("merge", "--merged", step, "--task", tmp_path / "task1", "--dry-run")  # task2 is in it
    words += ("--out", tmp_path / "new")
    inputs = manifest(step)["inputs"]
    folder = inputs["_pretrained_"]["source"]
    for source in (folder, {"_target_": "load", "pretrained_model_name_or_path": folder}):
        inputs["_pretrained_"]["source"] = source
        change_json(step / "nufilt.json", inputs=inputs)
        code, text = nufilt(*words)
        assert code == 0, text
        assert settings_to_continue({"merged": str(step)})["base"] == folder
    # What is there now is another model.
    clip(seed=3).save_pretrained(tmp_path / "_pretrained_")
    code, text = nufilt(*words)
    assert code == 1
    assert "is neither here nor beside it" in " ".join(text.split())


def test_what_belongs_to_the_merge_before_alone_is_not_taken_over(tmp_path):
    """Nor a base that is not found, which must be said."""
    save_stream(tmp_path, llama(), tasks=2)
    merge(tmp_path, ["task1"], "one")
    settings = manifest(tmp_path / "one")["settings"]
    for tokenizer, expected in (("task1", None), ("base", "base")):
        new = {**settings, "tokenizer": tokenizer, "weights": [0.5]}
        change_json(tmp_path / "one" / "nufilt.json", settings=new)
        continued = settings_to_continue({"merged": str(tmp_path / "one")})
        assert continued.get("tokenizer") == expected
        assert "weights" not in continued
        assert continued["seed"] == 42
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    code, text = go_on(tmp_path)
    assert code == 1
    assert "--base must be given: 'base', which '" in text
    assert "is neither here nor beside it" in text
    assert go_on(tmp_path, "--base", tmp_path / "elsewhere")[0] == 0


def test_the_same_command_once_more_says_that_all_is_done(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    merge(tmp_path, ["task1"], "one")
    assert "step 2, 14 layers merged" in go_on(tmp_path)[1]
    before = (tmp_path / "new" / "nufilt.json").stat().st_mtime_ns
    for words in ([], ["--dry-run"]):
        code, text = go_on(tmp_path, *words)
        assert code == 0
        assert "step 2, finished by an earlier run" in text
        assert "layers merged" not in text
    assert (tmp_path / "new" / "nufilt.json").stat().st_mtime_ns == before
