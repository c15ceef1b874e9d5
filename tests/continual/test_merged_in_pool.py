"""A `_merged_` of a pool is held to what `nufilt merge` holds a merged folder to, and a task is in
a merge once: by content, not by name.
"""

import shutil

import pytest
import torch

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.continual.layerwise import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.merge import merge_folders
from tests.continual.helpers import pool, saved_pool
from tests.continual.test_resume import SMALL, algorithm_in
from tests.merge.helpers import plan
from tests.tiny_models import clip, finetuned

NAMES = ("_pretrained_", "task1", "task2", "task3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a base and three tasks, and of two merges of the first two tasks."""
    folder = tmp_path_factory.mktemp("folders")
    for name, model in pool(3).items():
        model.save_pretrained(folder / name)
    tasks = ["task1", "task2"]
    settings = {**SMALL}
    del settings["shuffle_order"]
    merge_folders(plan(folder, tasks, base="_pretrained_", **settings), folder / "merged")
    algorithm_in(folder / "run").run(pool(2))
    shutil.move(folder / "run" / "checkpoints" / "merged_model_1", folder / "step")
    return folder


def go_on(folders, merged, names=("_pretrained_", "task3"), method=None, **options):
    """Merge models of a pool onto a folder; return the pool's entries."""
    paths = {name: folders / name for name in names}
    if method is None:
        algorithm = NufiltContinualMergingAlgorithm(**{**SMALL, **options})
    else:
        algorithm = LayerwiseMergingAlgorithm(method, shuffle_order=False, **options)
    return algorithm.run(saved_pool(folders, {}, **paths, _merged_=folders / merged))


@pytest.mark.parametrize("merged", ["merged", "step"])
def test_the_same_base_and_settings_go_on_without_a_word(folders, merged, caplog):
    shutil.rmtree(folders / "renamed", ignore_errors=True)
    shutil.copytree(folders / "_pretrained_", folders / "renamed")
    model = go_on(folders, merged)
    paths = {"_pretrained_": folders / "renamed", "third": folders / "task3"}
    models = saved_pool(folders, {}, **paths, _merged_=folders / merged)
    again = NufiltContinualMergingAlgorithm(**SMALL).run(models)
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
    assert "differ" not in caplog.text
    assert "another base" not in caplog.text


@pytest.mark.parametrize(("merged", "change"), [("merged", 1e-4), ("step", 1e-2)])
def test_another_base_is_refused_and_gone_on_from_where_the_user_says_so(folders, merged, change):
    base = clip()
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(change * torch.randn_like(parameter))
    base.save_pretrained(folders / "other")
    models = {"_pretrained_": folders / "other", "task3": folders / "task3"}
    models = saved_pool(folders, {}, **models, _merged_=folders / merged)
    message = r"was merged from another '_pretrained_' model than the pool's; .*verify=false"
    with pytest.raises(ValueError, match=message):
        NufiltContinualMergingAlgorithm(**SMALL).run(models)
    NufiltContinualMergingAlgorithm(**SMALL, verify=False).run(models)


OTHER_SETTINGS = {
    "null_rank is 6 there and 5 here": {"null_rank": 5},
    "lora_rank is 4 there and 3 here": {"lora_rank": 3},
    'other_params is "mean" there and "pretrained" here': {"other_params": "pretrained"},
    'target_modules is "auto" there and "all-linear" here': {"target_modules": "all-linear"},
    "seed is 42 there and 43 here": {"seed": 43},
}


@pytest.mark.parametrize("merged", ["merged", "step"])
def test_other_settings_are_said(folders, merged, caplog):
    options = {}
    for option in OTHER_SETTINGS.values():
        options |= option
    go_on(folders, merged, **options)
    (message,) = [text for text in caplog.messages if "'_merged_' was made with: " in text]
    assert all(difference in message for difference in OTHER_SETTINGS)


def test_a_method_of_sums_does_not_go_on_from_one_without(folders):
    with pytest.raises(ValueError, match=r"was merged by NUFILT, which keeps no sums"):
        go_on(folders, "step", method="spectral")


@pytest.mark.parametrize("merged", ["merged", "step"])
def test_a_task_that_is_merged_already_is_refused_with_its_step(folders, merged):
    shutil.rmtree(folders / "renamed", ignore_errors=True)
    shutil.copytree(folders / "task2", folders / "renamed")
    message = r"model 'renamed' is in '_merged_' already, as step 2 \('task2'\)"
    with pytest.raises(ValueError, match=message):
        go_on(folders, merged, ("_pretrained_", "renamed"))
    go_on(folders, merged, ("_pretrained_", "renamed"), verify=False)


def test_a_model_with_two_names_in_a_pool_is_refused():
    models = pool(2)
    models["again"] = finetuned(models["_pretrained_"], seed=1)

    with pytest.raises(ValueError, match="model 'again' is also model 'task1' of the pool"):
        NufiltContinualMergingAlgorithm(**SMALL).run(models)
    NufiltContinualMergingAlgorithm(**SMALL, verify=False).run(models)


def test_a_merge_in_memory_that_looks_like_one_of_another_base_is_refused():
    models = pool(2)
    models["_merged_"] = clip(7)
    options = {**SMALL, "num_merged": 1}
    with pytest.raises(ValueError, match=r"looks as if it was made from another base"):
        NufiltContinualMergingAlgorithm(**options).run(models)
