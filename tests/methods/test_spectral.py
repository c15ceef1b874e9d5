"""Spectral accumulation as a FusionBench algorithm: a method whose state is kept beside the merged model."""

from copy import deepcopy

import pytest
import torch
from fusion_bench.utils import instantiate
from safetensors.torch import load_file, save_file

from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.layers import select_layers
from fusion_bench_nufilt.storage.checkpoint import load_state, read_whole_checkpoint
from fusion_bench_nufilt.storage.manifest import read_manifest
from tests.continual.helpers import InterruptedRunError, interrupt_after, logging_to, pool

SETTINGS = {"layer_method": "spectral", "shuffle_order": False}


def algorithm_in(folder, **settings):
    return logging_to(folder, LayerwiseMergingAlgorithm(**{**SETTINGS, **settings}))


def difference(model, other, base):
    """Of the merged updates, over their norm, at most."""
    views = select_layers(base, "all-linear").values()
    a, b, zero = ([view.read(m).double() for view in views] for m in (model, other, base))
    return max(((x - y).norm() / (y - z).norm()).item() for x, y, z in zip(a, b, zero, strict=True))


def test_the_order_of_the_tasks_does_not_matter():
    models = {name: model.double() for name, model in pool().items()}
    results = [
        LayerwiseMergingAlgorithm(**{**SETTINGS, "shuffle_order": True}, seed=seed).run(models) for seed in (1, 2)
    ]
    assert difference(*results, models["_pretrained_"]) < 1e-5


def test_the_depth_ramp_makes_later_blocks_move_more():
    models = pool(2)
    plain, ramped = (LayerwiseMergingAlgorithm(**SETTINGS, ramp=ramp).run(deepcopy(models)) for ramp in (0.0, 0.4))
    for block, factor in ((0, 0.6), (1, 1.4)):
        key = f"vision_model.encoder.layers.{block}.mlp.fc1.weight"
        theta_0 = models["_pretrained_"].get_parameter(key)
        moved = [(model.get_parameter(key) - theta_0).norm().item() for model in (plain, ramped)]
        assert moved[1] / moved[0] == pytest.approx(factor, rel=1e-4)


@pytest.mark.parametrize("step", [1, 3])
def test_an_interrupted_run_goes_on_with_the_same_bits(tmp_path, step):
    algorithm_in(tmp_path / "whole").run(pool())
    with pytest.raises(InterruptedRunError):
        algorithm_in(tmp_path / "parts").run(pool(), on_step=interrupt_after(step))
    algorithm_in(tmp_path / "parts", resume=True).run(pool())
    last = [read_whole_checkpoint(tmp_path / run / "checkpoints" / "merged_model_3") for run in ("whole", "parts")]
    assert last[0]["files"] == last[1]["files"]
    assert "nufilt_state/model.safetensors" in last[0]["files"]


def test_a_model_is_merged_onto_an_earlier_merge(tmp_path):
    models = pool()
    whole = algorithm_in(tmp_path / "whole").run(deepcopy(models))
    first = {name: models[name] for name in ("_pretrained_", "task1", "task2", "task3")}
    algorithm_in(tmp_path / "first").run(deepcopy(first))
    for name in ("_pretrained_", "task4"):
        models[name].save_pretrained(tmp_path / name)
    paths = {name: str(tmp_path / name) for name in ("_pretrained_", "task4")}
    paths["_merged_"] = str(tmp_path / "first" / "checkpoints" / "merged_model_2")
    config = compose_run(["modelpool=nufilt_demo"]).modelpool
    rest = instantiate({"_target_": config["_target_"], "_recursive_": False, "models": paths})
    merged = algorithm_in(tmp_path / "rest").run(rest)
    for view in select_layers(whole, "all-linear").values():
        assert torch.equal(view.read(merged), view.read(whole))


def test_a_merged_model_without_its_state_is_refused():
    models = pool(2)
    models["_merged_"] = models.pop("task1")
    with pytest.raises(ValueError, match=r"lacks .*merges of the same layers only"):
        LayerwiseMergingAlgorithm(**SETTINGS, num_merged=1).run(models)


def test_a_merge_of_other_layers_is_refused(tmp_path):
    """What was merged into layers that are not known to the state would be lost."""
    models = pool(3)
    algorithm_in(tmp_path / "fc1", target_modules=["fc1"]).run(
        {k: models[k] for k in ("_pretrained_", "task1", "task2")}
    )
    models["_pretrained_"].save_pretrained(tmp_path / "_pretrained_")
    models["task3"].save_pretrained(tmp_path / "task3")
    paths = {name: str(tmp_path / name) for name in ("_pretrained_", "task3")}
    paths["_merged_"] = str(tmp_path / "fc1" / "checkpoints" / "merged_model_1")
    config = compose_run(["modelpool=nufilt_demo"]).modelpool
    rest = instantiate({"_target_": config["_target_"], "_recursive_": False, "models": paths})
    with pytest.raises(ValueError, match=r"merged_model_1' lacks 'encoder.*fc2"):
        algorithm_in(tmp_path / "rest").run(rest)


def test_a_state_that_was_changed_is_refused(tmp_path):
    algorithm_in(tmp_path).run(pool(3))
    file = tmp_path / "checkpoints" / "merged_model_2" / "nufilt_state" / "model.safetensors"
    state = load_file(file)
    name = next(iter(state))
    save_file({**state, name: state[name] + 1}, file)
    with pytest.raises(ValueError, match=rf"'{name}' is not what was saved"):
        load_state(file.parents[1], read_manifest(file.parents[1]))


def test_the_configuration_says_the_defaults():
    config = compose_run(["method=continual/spectral"]).method
    made, default = instantiate(config), LayerwiseMergingAlgorithm("spectral")
    assert made.options == default.options
    assert (made.targets.target_modules, made.targets.other_params) == ("all-linear", "mean")


def test_the_report_of_layers_has_the_votes(tmp_path):
    algorithm_in(tmp_path).run(pool(2))
    header, *rows = (tmp_path / "layers.csv").read_text().splitlines()
    assert header == "step,task,layer,shape,seconds,task_norm,mean,count"
    assert {row.rsplit(",", 1)[1] for row in rows} == {"1", "2"}
