"""The algorithm on real model classes, without the command line."""

import json
from copy import deepcopy

import pandas as pd
import pytest
import torch

from fusion_bench_nufilt import (
    FusionConfig,
    LayerwiseMergingAlgorithm,
    NufiltContinualMergingAlgorithm,
    fuse_layers,
)
from fusion_bench_nufilt.continual import task_order
from fusion_bench_nufilt.merge import layer_jobs, other_params
from fusion_bench_nufilt.methods.order_free import Sum
from fusion_bench_nufilt.models import select_layers
from fusion_bench_nufilt.utils.files import LOCK
from tests.continual.helpers import logging_to, noting, pool
from tests.tiny_models import clip, llama, t5, tower

pytestmark = pytest.mark.oldest

RANKS = {"null_rank": 6, "lora_rank": 4, "task_rank": 3, "max_steps": 5}
SMALL = {**RANKS, "shuffle_order": False, "evaluate": "last"}


def same(state, other):
    return all(torch.equal(value, other[key]) for key, value in state.items())


@pytest.mark.parametrize("make", [clip, t5, llama])
def test_a_dict_of_models_is_merged_as_fuse_layers_says(make):
    models = pool(3, make())
    before = {name: deepcopy(model.state_dict()) for name, model in models.items()}
    merged = NufiltContinualMergingAlgorithm(**SMALL, seed=7).run(models).state_dict()

    layers = {view.key: name for name, view in select_layers(models["_pretrained_"]).items()}
    config = FusionConfig(**RANKS)
    states = {}
    for name in models:
        states[name] = {layer: before[name][key] for key, layer in layers.items()}
    expected = states["_pretrained_"]
    for step in (1, 2, 3):
        expected, _ = fuse_layers(
            states["_pretrained_"], expected, states[f"task{step}"], config, seed=7, step=step
        )
    for key, value in merged.items():
        weight = before["_pretrained_"][key]
        if key in layers:
            weight = expected[layers[key]]
        assert torch.equal(value, weight), key
    for name, model in models.items():
        assert same(model.state_dict(), before[name]), f"the user's model {name} was changed"


def test_means_in_memory_are_the_same_in_blocks_of_any_size(monkeypatch):
    def merged():
        algorithm = NufiltContinualMergingAlgorithm(**SMALL, seed=7, other_params="mean")
        return algorithm.run(pool(3, clip().bfloat16())).state_dict()

    whole = merged()
    monkeypatch.setattr(other_params, "CHUNK_BYTES", 2**9)
    assert same(whole, merged())


def test_a_step_that_fails_leaves_the_sums_that_it_went_on_from(monkeypatch):
    accumulate = Sum.accumulate

    def fail_once_added(self, state, task):
        after = accumulate(self, state, task)
        if after["count"] == 2:
            raise ValueError("stopped")
        return after

    monkeypatch.setattr(Sum, "accumulate", fail_once_added)
    models = pool(2)
    algorithm = LayerwiseMergingAlgorithm("sum", shuffle_order=False)
    with pytest.raises(ValueError, match="stopped"):
        algorithm.run(models)
    first = LayerwiseMergingAlgorithm("sum", shuffle_order=False)
    first.run({name: models[name] for name in ("_pretrained_", "task1")})
    sums = {key: value for key, value in first.state().items() if key.endswith(".sum")}
    assert sums
    assert same(sums, algorithm.state())


def test_an_attribute_is_what_a_run_merges_with():
    models = pool(2)
    algorithm = NufiltContinualMergingAlgorithm(**SMALL)
    algorithm.null_rank = 9
    algorithm.target_modules = "all-linear"
    expected = NufiltContinualMergingAlgorithm(
        **{**SMALL, "null_rank": 9, "target_modules": "all-linear"}
    )
    assert same(algorithm.run(models).state_dict(), expected.run(models).state_dict())
    algorithm.null_rank = -1
    with pytest.raises(ValueError, match="null_rank"):
        algorithm.run(models)


def test_the_order_is_the_seeds():
    algorithm = NufiltContinualMergingAlgorithm(**{**SMALL, "shuffle_order": True}, seed=43)
    algorithm.run(pool(3))
    assert algorithm.matrix.tasks == task_order(["task1", "task2", "task3"], shuffle=True, seed=43)


def test_a_run_without_room_for_its_layers_in_float32_rounds_them_and_says_so(monkeypatch, caplog):
    models = {name: model.bfloat16() for name, model in pool(3, llama()).items()}
    whole = NufiltContinualMergingAlgorithm(**SMALL).run(deepcopy(models))
    monkeypatch.setattr(layer_jobs, "free_memory", lambda device: 0)
    rounded = NufiltContinualMergingAlgorithm(**SMALL).run(models)
    (message,) = [record.getMessage() for record in caplog.records if "room" in record.message]
    assert "rounded to the pretrained one's dtype after every task" in message
    assert not same(rounded.state_dict(), whole.state_dict())
    for key, value in rounded.state_dict().items():
        expected = whole.state_dict()[key].double()
        assert (value.double() - expected).norm() < 0.05 * expected.norm()


def test_files_of_a_run_with_a_log_directory(tmp_path):
    merged = logging_to(tmp_path, NufiltContinualMergingAlgorithm(**SMALL)).run(pool(3))
    last = type(merged).from_pretrained(tmp_path / "checkpoints" / "merged_model_2")
    assert same(merged.state_dict(), last.state_dict())
    assert json.loads((tmp_path / "model_names.json").read_text()) == ["task1", "task2", "task3"]
    rows = pd.read_csv(tmp_path / "layers.csv")
    assert rows.groupby("step").size().to_dict() == {1: 10, 2: 10, 3: 10}
    assert (rows[rows["step"] > 1]["filtered_share"] > 0).all()
    hidden = {path.name for path in tmp_path.rglob(".*") if path.is_file()}
    assert hidden <= {LOCK}, "temporary files were left behind"


def mlp(model):
    return tower(model).encoder.layers[0].mlp


@pytest.mark.parametrize(
    ("spoilt", "check_models"), [("_pretrained_", True), ("task3", True), ("task3", False)]
)
def test_a_bad_model_is_refused_by_name_and_before_any_work_where_models_are_checked(
    spoilt, check_models
):
    models = pool(3)
    mlp(models[spoilt]).fc1.weight.data[0, 0] = float("nan")
    steps = []
    algorithm = NufiltContinualMergingAlgorithm(**SMALL, check_models=check_models)
    with pytest.raises(ValueError, match=rf"'{spoilt}', \w+ '.*fc1.* has NaN or infinite"):
        algorithm.run(models, on_step=noting(steps))
    assert steps == [] or not check_models


def test_a_log_directory_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(NufiltContinualMergingAlgorithm, "log_dir", str(tmp_path / "file" / "logs"))
    with pytest.raises(ValueError, match=r"log directory '.*logs' can't be written"):
        NufiltContinualMergingAlgorithm(**SMALL).run(pool(1))


def test_a_score_of_ones_own_is_a_function_of_the_step_and_the_merged_model():
    seen = {}

    def on_step(step, model):
        seen[step] = mlp(model).fc1.weight.norm().item()

    merged = NufiltContinualMergingAlgorithm(**SMALL).run(pool(3), on_step=on_step)
    assert list(seen) == [1, 2, 3]
    assert seen[3] == mlp(merged).fc1.weight.norm().item()
    assert len(set(seen.values())) == 3


def test_the_profile_is_printed_by_fusion_bench_alone(capsys):
    NufiltContinualMergingAlgorithm(**SMALL).run(pool(2))
    assert "loading models" not in capsys.readouterr().out


def test_no_option_is_called_unused(caplog):
    NufiltContinualMergingAlgorithm(shuffle_order=False, null_rank=8, _usage_="a test")
    LayerwiseMergingAlgorithm("spectral", seed=1)
    assert "nused" not in caplog.text
