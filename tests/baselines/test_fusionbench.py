"""FusionBench's methods give through the protocol what they give by themselves."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from fusion_bench import BaseModelPool
from fusion_bench.method import MagMaxAlgorithm, TaskArithmeticAlgorithm
from fusion_bench.utils import instantiate
from lightning import Fabric
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_nufilt.baselines import BatchMethodBaseline, ContinualMethodBaseline
from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.compare.overrides import key_value
from tests.models import clip, finetuned

BATCH = ("task_arithmetic", "ties_merging", "magmax", "wudi", "iso_c", "iso_cts", "tsvm", "knots_ties")
OWN = ("opcm", "weight_average")


def pool(tasks=3):
    base = clip()
    return {"_pretrained_": base} | {f"task{i}": finetuned(base, seed=i) for i in range(1, tasks + 1)}


def configured(method, *overrides):
    """The config of a method. Options are set on the composed config, since Hydra takes long to compose another."""
    options = [word for word in overrides if word.startswith("method.")]
    config = compose_run([f"method={method}", *(word for word in overrides if word not in options)]).method
    for key, value in map(key_value, options):
        OmegaConf.update(config, key.removeprefix("method."), value)
    return config


def baseline(name, *overrides):
    algorithm = instantiate(configured(f"continual/{name}", *overrides))
    algorithm._fabric_instance = Fabric(devices=1, accelerator="cpu")
    return algorithm


def by_itself(name, models, *overrides):
    """FusionBench's own run of a continual method."""
    method = instantiate(configured(f"{'dop' if name == 'dop' else 'opcm'}/{name}", *overrides))
    method._fabric_instance = Fabric(devices=1, accelerator="cpu")
    method._program = SimpleNamespace(taskpool=SimpleNamespace(_test_datasets=None))
    method.save_on_every_step = method.evaluate_on_every_step = False
    return method.run(BaseModelPool(deepcopy(models)))


def assert_same(model, other, **tolerances):
    torch.testing.assert_close(dict(model.named_parameters()), dict(other.named_parameters()), **tolerances)


@pytest.mark.parametrize("name", [*BATCH, *OWN])
def test_every_step_is_finite_and_no_model_of_the_pool_is_changed(name):
    models = pool()
    before = {key: deepcopy(model.state_dict()) for key, model in models.items()}
    steps = []
    merged = baseline(name).run(models, on_step=steps.append)
    assert steps == [1, 2, 3]
    assert all(torch.isfinite(parameter).all() for parameter in merged.parameters())
    for key, model in models.items():
        assert all(torch.equal(value, before[key][name]) for name, value in model.state_dict().items()), key


@pytest.mark.parametrize("name", [*OWN, "dop"])
def test_a_continual_method_of_fusionbench_is_run_as_it_is(name):
    models, seed = pool(), 43
    settings = ["num_steps=2"] if name == "dop" else []
    merged = baseline(name, f"method.seed={seed}", *(f"method.base_method.{setting}" for setting in settings))
    own = by_itself(name, models, f"method.seed={seed}", *(f"method.{setting}" for setting in settings))
    assert_same(merged.run(models), own, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "form"), [("task_arithmetic", "paper"), ("ties_merging", "released")])
def test_it_is_fusionbenchs_continual_one(name, form):
    models = pool()
    merged = baseline(name, "method.seed=43", f"method.form={form}").run(models)
    assert_same(merged, by_itself(name, models, "method.seed=43", "method.scaling_factor=0.3"))


@pytest.mark.parametrize(
    ("name", "form", "method"),
    [("task_arithmetic", "paper", TaskArithmeticAlgorithm), ("magmax", "released", MagMaxAlgorithm)],
)
def test_with_its_own_factor_a_method_gives_what_it_gives_for_all_models_at_once(name, form, method):
    models, settings = pool(), [f"method.form={form}", "method.shuffle_order=false"]
    merged = baseline(name, *settings, "method.base_method.scaling_factor=0.4").run(models)
    assert_same(merged, method(scaling_factor=0.4).run(BaseModelPool(deepcopy(models))))


def test_without_a_factor_the_method_merges_what_it_is_given():
    models = pool(2)
    merged = baseline("task_arithmetic", "method.shuffle_order=false", "method.merged_scale=1").run(models)
    theta_0, theta_1, theta_2 = (dict(model.named_parameters()) for model in models.values())
    for key, value in merged.named_parameters():
        tau_1, tau_2 = theta_1[key] - theta_0[key], theta_2[key] - theta_0[key]
        torch.testing.assert_close(value, theta_0[key] + 0.3 * (tau_1 + tau_2))


def test_any_batch_method_of_fusionbench_can_be_run():
    merged = baseline("batch", "+method@method.base_method=simple_average", "method.shuffle_order=false").run(pool(2))
    models = pool(2)
    for key, value in merged.named_parameters():
        mean = (models["task1"].get_parameter(key) + models["task2"].get_parameter(key)) / 2
        torch.testing.assert_close(value, mean)


def test_a_batch_method_goes_on_from_a_merged_model(tmp_path):
    models, name = pool(), "method.shuffle_order=false"
    whole = baseline("iso_c", name).run(models)
    first = baseline("iso_c", name).run({key: models[key] for key in ("_pretrained_", "task1", "task2")})
    rest = {"_pretrained_": models["_pretrained_"], "_merged_": first, "task3": models["task3"]}
    assert_same(baseline("iso_c", name, "method.num_merged=2").run(rest), whole, rtol=0, atol=0)


class ReturnsAnother:
    def run(self, modelpool):
        return nn.Linear(1, 1)


class ReturnsNaN:
    def run(self, modelpool):
        model = modelpool.load_pretrained_model()
        model.vision_model.post_layernorm.bias.data.fill_(float("nan"))
        return model


@pytest.mark.parametrize(
    ("method", "says"), [(ReturnsAnother, "Linear"), (ReturnsNaN, r"after step 2.*post_layernorm")]
)
def test_a_result_that_is_no_model_of_the_pool_is_refused(method, says):
    algorithm = BatchMethodBaseline(OmegaConf.create({"_target_": f"{__name__}.{method.__name__}"}))
    with pytest.raises(ValueError, match=says):
        algorithm.run(pool(2))


def test_a_bad_model_is_refused_before_any_work():
    models = pool()
    models["task2"].vision_model.post_layernorm.bias.data[0] = float("inf")
    with pytest.raises(ValueError, match=r"task2.*post_layernorm"):
        baseline("wudi").run(models, on_step=lambda step: pytest.fail("a step was merged"))


def test_a_method_with_a_memory_of_its_own_does_not_go_on_from_a_model():
    models, opcm = pool(), compose_run(["method=continual/opcm"]).method.base_method
    with pytest.raises(ValueError, match=r"OPCM.*_merged_"):
        ContinualMethodBaseline(opcm, num_merged=1).run({**models, "_merged_": models["_pretrained_"]})
    with pytest.raises(ValueError, match=r"OPCM.*resume"):
        ContinualMethodBaseline(opcm, resume=True)
