"""What a merge says before any work."""

import shutil

import pytest

from tests.commands.helpers import nufilt
from tests.merge.helpers import RANKS, change, merge, plan


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


@pytest.mark.parametrize("again", ["task1", "./base/../task1", "link"])
def test_a_task_that_comes_twice_is_refused_by_whatever_name(stream, again):
    (stream / "link").symlink_to(stream / "task1")
    with pytest.raises(ValueError, match=r"is also task '.*task1': name it once, and set its"):
        plan(stream, ["task1", "task2", again])


def test_the_merged_model_is_no_task(stream):
    merge(stream, ["task1"], "one")
    with pytest.raises(ValueError, match="one' is also --merged"):
        plan(stream, ["one"], merged="one")


def test_what_nufilt_merged_is_no_sum_to_go_on_from(stream):
    merge(stream, ["task1"], "one")
    with pytest.raises(ValueError, match="one' was merged by NUFILT, which keeps no sums that TSV"):
        plan(stream, ["task2"], merged="one", method="best")
    plan(stream, ["task1", "task2"], method="best")


@pytest.mark.parametrize("role", ["task", "merged"])
def test_a_result_far_from_its_base_is_not_suspected_to_be_of_another(stream, role):
    for task in ("task1", "task2", "task3"):
        for layer in range(2):
            key = f"model.layers.{layer}.mlp.up_proj.weight"
            change(stream / task, key, lambda value: value + value.std())
    options = {"method": "sum", "scale": 1.0, "target_modules": ["up_proj"]}
    merge(stream, ["task1", "task2"], "far", **options)
    if role == "task":
        warnings = plan(stream, ["far"], **options).warnings
    else:
        warnings = plan(stream, ["task3"], merged="far", **options).warnings
    assert not [text for text in warnings if "far' looks as if it was made from another" in text]
    shutil.copytree(stream / "far", stream / "unknown")
    (stream / "unknown" / "nufilt.json").unlink()
    warnings = plan(stream, ["unknown"], **options).warnings
    assert [text for text in warnings if "unknown' looks as if it was made from another" in text]
