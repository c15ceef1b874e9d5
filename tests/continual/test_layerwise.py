"""The algorithm on real model classes, without the command line."""

import json
import re
from copy import deepcopy

import pandas as pd
import pytest
import torch
from fusion_bench.utils import instantiate
from torch import nn

from fusion_bench_nufilt import (
    FusionConfig,
    LayerwiseMergingAlgorithm,
    NufiltContinualMergingAlgorithm,
    fuse_layers,
)
from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.continual import task_order
from fusion_bench_nufilt.merge import other_params, planned
from fusion_bench_nufilt.methods.order_free import Sum
from fusion_bench_nufilt.models import select_layers
from fusion_bench_nufilt.utils.files import LOCK
from tests.continual.helpers import logging_to, pool
from tests.nufilt.test_parity import load_case
from tests.tiny_models import TOWER, Shared, clip, llama, t5, tower

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


def test_weights_shared_by_modules_are_merged_once_and_stay_shared():
    base = Shared()
    merged = NufiltContinualMergingAlgorithm(**SMALL, target_modules="all-linear").run(
        pool(3, base)
    )
    assert merged.first.weight is merged.second.weight
    assert merged.head.weight is merged.embedding.weight
    unshared = nn.ModuleDict(
        {"first": nn.Linear(6, 6, bias=False), "head": nn.Linear(6, 10, bias=False)}
    )
    models = {}
    for name, model in pool(3, base).items():
        models[name] = deepcopy(unshared)
        models[name].first.weight.data.copy_(model.first.weight)
        models[name].head.weight.data.copy_(model.head.weight)
    alone = NufiltContinualMergingAlgorithm(**SMALL, target_modules="all-linear").run(models)
    assert torch.equal(merged.first.weight, alone.first.weight)
    assert torch.equal(merged.head.weight, alone.head.weight)


def test_a_run_without_room_for_its_layers_in_float32_rounds_them_and_says_so(monkeypatch, caplog):
    models = {name: model.bfloat16() for name, model in pool(3, llama()).items()}
    whole = NufiltContinualMergingAlgorithm(**SMALL).run(deepcopy(models))
    monkeypatch.setattr(planned, "free_memory", lambda device: 0)
    rounded = NufiltContinualMergingAlgorithm(**SMALL).run(models)
    (message,) = [record.getMessage() for record in caplog.records if "room" in record.message]
    assert "rounded to the pretrained one's dtype after every task" in message
    assert not same(rounded.state_dict(), whole.state_dict())
    for key, value in rounded.state_dict().items():
        expected = whole.state_dict()[key].double()
        assert (value.double() - expected).norm() < 0.05 * expected.norm()


def test_what_the_dtype_can_not_hold_is_refused_as_in_folders():
    models = {name: model.half() for name, model in pool(2, llama()).items()}
    for name, model in models.items():
        value = 4e4 if name == "_pretrained_" else 6e4
        model.model.layers[0].mlp.up_proj.weight.data.fill_(value)
    run = LayerwiseMergingAlgorithm("sum", scale=2.0, evaluate="last")
    with pytest.raises(
        ValueError, match=r"up_proj\.weight' has values that torch\.float16 can't hold"
    ):
        run.run(models)


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


# --- bad input: refused before any work ---


def mlp(model):
    return tower(model).encoder.layers[0].mlp


def spoil(model, value):
    mlp(model).fc1.weight.data[0, 0] = value


LACKS = (
    rf"model 'task3' lacks '{re.escape(TOWER)}"
    r"encoder\.layers\.1\.self_attn\.k_proj\.weight' \(32, 32\)"
)
SHAPE = (
    r"model 'task3', tensor '.*fc1\.weight': shape \(65, 32\) differs from \(64, 32\) of the base"
)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda models: tower(models["task3"]).encoder.layers.pop(1), LACKS),
        (lambda models: setattr(mlp(models["task3"]), "fc1", nn.Linear(32, 65)), SHAPE),
        (
            lambda models: spoil(models["task3"], float("nan")),
            r"'task3', tensor '.*fc1\.weight' has NaN or infinite",
        ),
        (
            lambda models: spoil(models["_pretrained_"], float("inf")),
            r"'_pretrained_', tensor '.*fc1\.weight' has NaN",
        ),
    ],
)
def test_a_bad_pool_is_refused_before_any_work(damage, message):
    models = pool(3)
    damage(models)
    with pytest.raises(ValueError, match=message):
        NufiltContinualMergingAlgorithm(**SMALL).run(
            models, on_step=lambda *_: pytest.fail("merged")
        )


def test_a_bad_model_is_also_refused_when_models_are_not_checked_beforehand():
    models = pool(3)
    spoil(models["task3"], float("nan"))
    with pytest.raises(ValueError, match="model 'task3'"):
        NufiltContinualMergingAlgorithm(**SMALL, check_models=False).run(models)


def test_a_log_directory_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(NufiltContinualMergingAlgorithm, "log_dir", str(tmp_path / "file" / "logs"))
    with pytest.raises(ValueError, match=r"log directory '.*logs' can't be written"):
        NufiltContinualMergingAlgorithm(**SMALL).run(pool(1))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("evaluate", "sometimes"),
        ("seed", 1.5),
        ("seed", None),
        ("shuffle_order", "yes"),
        ("save_on_every_step", 1),
    ],
)
def test_a_protocol_value_out_of_range_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=key):
        NufiltContinualMergingAlgorithm(**{key: value})


# --- the published stream, through the presets and the algorithm ---


CASES = {
    "nufilt": "rank_saturated_f64",
    "nufilt/release": "release_first_task_two_tasks_f64",
    "nufilt/filter_only": "filter_only_f64",
}


@pytest.mark.parametrize("preset", CASES)
def test_a_preset_reproduces_the_published_stream(preset, monkeypatch):
    case, vectors = load_case(CASES[preset])
    # The presets hold the paper's ranks; the vectors belong to smaller layers.
    overrides = [f"method.null_rank={case['null_rank']}", f"method.task_rank={case['task_rank']}"]
    if case["lora_rank"]:
        overrides.append(f"method.lora_rank={case['lora_rank']}")
    method = compose_run([f"method={preset}", "method.shuffle_order=false", *overrides]).method
    method.target_modules = "all-linear"
    monkeypatch.setattr(
        "fusion_bench_nufilt.methods.nufilt.initial_A",
        lambda name, d_i, config, seed, step: vectors[f"lora_A_init.{step - 1}"],
    )

    def model(weight):
        layer = nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
        layer.weight.data.copy_(weight)
        return nn.ModuleDict({"layer": layer})

    models = {"_pretrained_": model(vectors["pretrained"])}
    models |= {f"task{t}": model(vectors[f"task.{t}"]) for t in range(case["tasks"])}
    merged = instantiate(method).run(models)
    last = case["tasks"] - 1
    tau_norm = (vectors[f"task.{last}"] - vectors["pretrained"]).norm()
    error = (merged["layer"].weight - vectors[f"merged.{last}"]).norm() / tau_norm
    assert error <= 1e-9


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
