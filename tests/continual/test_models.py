"""A weight that a checkpoint lacks is drawn at random by transformers, and never merged."""

import pytest
import torch
from fusion_bench import BaseModelPool
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionModel

from fusion_bench_nufilt.continual.models import load_model
from tests.continual.helpers import pool, saved_pool
from tests.continual.test_resume import algorithm_in
from tests.tiny_models import TOWER

pytestmark = pytest.mark.oldest

FC1 = f"{TOWER}encoder.layers.1.mlp.fc1.weight"
NORM = f"{TOWER}post_layernorm.weight"


def pool_without(folder, name, key):
    """A pool of folders, one of which lacks a weight."""
    models = saved_pool(folder, pool(2))
    path = folder / name / "model.safetensors"
    save_file(
        {k: value for k, value in load_file(path).items() if k != key},
        path,
        metadata={"format": "pt"},
    )
    return models


@pytest.mark.parametrize("check_models", [True, False])
@pytest.mark.parametrize("name", ["_pretrained_", "task2"])
def test_a_model_whose_checkpoint_lacks_a_merged_layer_is_refused_by_name(
    tmp_path, name, check_models
):
    algorithm = algorithm_in(tmp_path / "logs", check_models=check_models)
    with pytest.raises(
        ValueError,
        match=rf"model '{name}'.* lacks (layer )?'{FC1}'.*; exclude_modules=.* leaves it out",
    ):
        algorithm.run(pool_without(tmp_path, name, FC1))


def test_a_weight_that_is_not_merged_may_be_missing_and_does_not_count_in_its_mean(
    tmp_path, caplog
):
    models = pool_without(tmp_path, "task1", NORM)
    algorithm_in(tmp_path / "kept", other_params="pretrained").run(models)
    merged = algorithm_in(tmp_path / "mean", other_params="mean").run(models)
    assert f"'task1' is left out of the mean of '{NORM}'" in caplog.text
    assert torch.equal(merged.state_dict()[NORM], models.load_model("task2").state_dict()[NORM])


def test_transformers_loads_as_before_afterwards(tmp_path):
    loader = vars(CLIPVisionModel.__mro__[2])
    models = pool_without(tmp_path, "task1", FC1)
    assert load_model(models, "task1")[1] == [FC1]
    assert load_model(models, "task2")[1] == []
    assert vars(CLIPVisionModel.__mro__[2]) == loader
    _, info = CLIPVisionModel.from_pretrained(tmp_path / "task1", output_loading_info=True)
    assert list(info["missing_keys"]) == [FC1]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"a": "x"}, r"the model pool has no '_pretrained_' model, only \['a'\]"),
        ({"_pretrained_": "x"}, "the model pool is empty: there is no fine-tuned model"),
        (
            {"_pretrained_": "x", "a": "y", "_merged_": "/nowhere"},
            "how many models are in '_merged_'",
        ),
        (
            {"_pretrained_": "x", "a": 7},
            "model 'a' of the pool must be a folder, a hub name or have a _target_, got 7",
        ),
    ],
)
def test_a_pool_of_which_nothing_can_be_merged_is_refused(tmp_path, models, message):
    with pytest.raises(ValueError, match=message):
        algorithm_in(tmp_path).run(BaseModelPool(models))


def test_a_number_of_merged_models_without_a_merge_is_refused(tmp_path):
    with pytest.raises(ValueError, match="num_merged=2, but the model pool has no '_merged_'"):
        algorithm_in(tmp_path, num_merged=2).run(pool(2))


@pytest.mark.parametrize("name", ["average", "continual", "model_info"])
def test_a_model_whose_scores_a_report_can_not_hold_is_refused_before_any_is_loaded(tmp_path, name):
    models = {"_pretrained_": "/nowhere", "task1": "/nowhere", name: "/nowhere"}
    message = f"model '{name}': a report has .*; give the model another name in modelpool.models"
    with pytest.raises(ValueError, match=message):
        algorithm_in(tmp_path).run(BaseModelPool(models))
