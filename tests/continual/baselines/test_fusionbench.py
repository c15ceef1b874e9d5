"""FusionBench's methods under the protocol: they give what they give by themselves, or what a
formula says.

The formulas are written out for vectors of one layer.
"""

from copy import deepcopy
from functools import partial, reduce
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fusion_bench import BaseModelPool
from fusion_bench.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.continual.baselines import BatchMethodBaseline, ContinualMethodBaseline
from fusion_bench_nufilt.continual.baselines.fusionbench import RuleConfig, shifted
from fusion_bench_nufilt.continual.run_folder import finished_step
from tests.continual.baselines.helpers import baseline, configured, on_cpu, same
from tests.continual.baselines.test_knots import oracle_knots, oracle_ties
from tests.continual.helpers import InterruptedRunError, interrupt_after, logging_to, noting, pool
from tests.tiny_models import clip, finetuned, llama, tower

pytestmark = pytest.mark.oldest

IN_ORDER = "method.shuffle_order=false"


def by_itself(name, models, *overrides):
    """FusionBench's own run of a continual method."""
    folder = "opcm"
    if name == "dop":
        folder = "dop"
    method = on_cpu(instantiate(configured(f"{folder}/{name}", *overrides)))
    method._program = SimpleNamespace(taskpool=SimpleNamespace(_test_datasets=None))
    method.save_on_every_step = method.evaluate_on_every_step = False
    return method.run(BaseModelPool(deepcopy(models)))


def assert_close(model, other):
    torch.testing.assert_close(dict(model.named_parameters()), dict(other.named_parameters()))


LEFT_AS_IT_WAS = "encoder.layers.1.mlp.fc1.weight"


def merge_with_a_layer_left(name, *tasks):
    """Merge two tasks, of which some leave a layer as it was; return the layer of all models, by
    name.
    """
    models = pool(2)
    keys = [key for key, _ in models["task2"].named_parameters()]
    (key,) = [key for key in keys if key.endswith(LEFT_AS_IT_WAS)]
    with torch.no_grad():
        for task in tasks:
            models[task].get_parameter(key).copy_(models["_pretrained_"].get_parameter(key))
    weights = {}
    for model, module in models.items():
        weights[model] = module.get_parameter(key).detach().clone()
    options = ["method.base_method.num_steps=2"] if name == "dop" else []
    merged = baseline(name, IN_ORDER, *options).run(models)
    return {**weights, "merged": merged.get_parameter(key)}


@pytest.mark.parametrize("name", ["wudi", "tsvm", "tsvm_svc", "iso_c", "opcm", "dop"])
def test_a_layer_that_a_task_leaves_as_it_was_is_merged(name):
    """WUDI and DOP divide by the length of its update, which is zero."""
    weights = merge_with_a_layer_left(name, "task2")
    assert torch.isfinite(weights["merged"]).all()
    if name in ("wudi", "dop"):
        torch.testing.assert_close(weights["merged"].data, weights["task1"])


def test_dop_takes_a_layer_from_the_only_task_that_changes_it():
    weights = merge_with_a_layer_left("dop", "task1")
    torch.testing.assert_close(weights["merged"].data, weights["task2"])
    weights = merge_with_a_layer_left("dop", "task1", "task2")
    assert torch.equal(weights["merged"], weights["_pretrained_"])


@pytest.mark.parametrize("name", ["opcm", "weight_average", "dop"])
def test_a_continual_method_of_fusionbench_is_run_as_it_is(name):
    models = pool(3)
    of_baseline = ["method.seed=43"]
    of_fusion_bench = ["method.seed=43"]
    if name == "dop":
        of_baseline.append("method.base_method.num_steps=2")
        of_fusion_bench.append("method.num_steps=2")
    merged = baseline(name, *of_baseline).run(models)
    assert same(merged, by_itself(name, models, *of_fusion_bench))


def test_a_continual_method_that_overflows_is_refused_and_not_scored():
    models = pool(2)
    for task, value in (("task1", 3e38), ("task2", 3.1e38)):
        for parameter in models[task].parameters():
            parameter.data.fill_(value)
    target = "fusion_bench.method.opcm.task_arithmetic.ContinualTaskArithmeticForCLIP"
    method = ContinualMethodBaseline(
        OmegaConf.create({"_target_": target, "scaling_factor": 1.0}), shuffle_order=False
    )
    with pytest.raises(ValueError, match="merged after step 2"):
        on_cpu(method).run(models)


def test_any_batch_method_of_fusionbench_can_be_run():
    models = pool(2)
    merged = baseline("batch", "+method@method.base_method=simple_average", IN_ORDER).run(models)
    for key, value in merged.named_parameters():
        both = models["task1"].get_parameter(key) + models["task2"].get_parameter(key)
        torch.testing.assert_close(value, both / 2)


def test_a_rule_that_is_set_as_an_attribute_is_followed():
    models = pool(3)
    algorithm = baseline("iso_c", IN_ORDER)
    algorithm.rule = "restart"
    expected = baseline("iso_c", IN_ORDER, "method.rule=restart")
    assert same(algorithm.run(models), expected.run(models))


class ReturnsAnother:
    def run(self, modelpool):
        return nn.Linear(1, 1)


class ReturnsNaN:
    def run(self, modelpool):
        model = modelpool.load_pretrained_model()
        tower(model).post_layernorm.bias.data.fill_(float("nan"))
        return model


@pytest.mark.parametrize(
    ("name", "says"), [("ReturnsAnother", "Linear"), ("ReturnsNaN", r"after step 2.*post_layer")]
)
def test_a_result_that_is_no_model_of_the_pool_is_refused(name, says):
    algorithm = BatchMethodBaseline(OmegaConf.create({"_target_": f"{__name__}.{name}"}))
    with pytest.raises(ValueError, match=says):
        algorithm.run(pool(2))


def test_a_bad_model_is_refused_before_any_work():
    models = pool(3)
    tower(models["task2"]).post_layernorm.bias.data[0] = float("inf")
    with pytest.raises(ValueError, match=r"task2.*post_layernorm"):
        baseline("wudi").run(models, on_step=lambda *_: pytest.fail("a step was merged"))


def test_a_method_with_a_memory_of_its_own_does_not_go_on_from_a_model():
    models = pool(3)
    opcm = compose_run(["method=continual/opcm"]).method.base_method
    models["_merged_"] = models["_pretrained_"]
    with pytest.raises(ValueError, match=r"OPCM.*_merged_"):
        ContinualMethodBaseline(opcm, num_merged=1).run(models)
    with pytest.raises(ValueError, match=r"add_running.*_merged_"):
        baseline("ties_merging", "method.num_merged=1").run(models)


LAMBDA = 0.4  # the factor of a method
KEPT = 30  # the per cents that TIES keeps


def magmax(old, new):
    return np.where(abs(new) >= abs(old), new, old)


def ties(old, new):
    return oracle_ties([old.ravel(), new.ravel()], KEPT, "sum").reshape(old.shape)


def flattened(*taus):
    U, S, V = np.linalg.svd(sum(taus), full_matrices=False)
    return S.mean() * U @ V


def knots(old, new):
    return oracle_knots([old, new], KEPT, "sum")


def added(join, taus):
    """τ~ + λ join(τ~, τ), for one τ after another; the first τ~ is λ τ."""
    update = LAMBDA * taus[0]
    for tau in taus[1:]:
        update = update + LAMBDA * join(update, tau)
    return update


def running(join, taus):
    """λ (T_1 + T_2 + ...), T_t = join(T_{t-1}, τ_t)."""
    return LAMBDA * sum(accumulate(taus, join))


FORMULAS = {
    ("task_arithmetic", "at_once"): lambda taus: LAMBDA * sum(taus),
    ("task_arithmetic", "restart"): lambda taus: LAMBDA * taus[-1],
    ("ties_merging", "add_running"): partial(running, ties),
    ("ties_merging", "add"): partial(added, ties),
    ("magmax", "add_running"): partial(running, magmax),
    ("magmax", "at_once"): lambda taus: LAMBDA * reduce(magmax, taus),
    ("knots_ties", "add"): partial(added, knots),
    ("iso_c", "at_once"): partial(reduce, flattened),
}
FACTOR = f"method.base_method.scaling_factor={LAMBDA}"
THRESHOLD = f"method.base_method.threshold={KEPT}"
SETTINGS = {
    "task_arithmetic": [FACTOR],
    "magmax": [FACTOR],
    "iso_c": [],
    "ties_merging": [FACTOR, THRESHOLD],
    "knots_ties": [FACTOR, THRESHOLD],
}


#: The first of a stream is the same lines for all methods.
CASES = [(*case, 3) for case in FORMULAS]
CASES += [("task_arithmetic", "restart", 1), ("magmax", "add_running", 1)]


@pytest.mark.parametrize(("name", "rule", "steps"), CASES)
def test_a_method_follows_the_formula_of_its_rule(name, rule, steps):
    base = nn.Linear(7, 5, bias=False, dtype=torch.float64)
    models = {"_pretrained_": base}
    for number in range(1, steps + 1):
        models[f"task{number}"] = finetuned(base, number, scale=1)
    theta_0, *thetas = [model.weight.detach().numpy().copy() for model in models.values()]
    merged = baseline(name, f"method.rule={rule}", IN_ORDER, *SETTINGS[name]).run(models)
    update = merged.weight.detach().numpy() - theta_0
    expected = FORMULAS[name, rule]([theta - theta_0 for theta in thetas])
    torch.testing.assert_close(update, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["iso_c", "iso_cts", "tsvm", "tsvm_svc", "wudi"])
def test_a_method_without_a_factor_takes_the_first_model_as_it_is(name):
    models = pool(1)
    assert same(baseline(name).run(models), models["task1"])


@pytest.mark.parametrize("bad", [{"rule": "sum"}, {"merged_scale": 0}, {"merged_scale": "x"}])
def test_values_out_of_range_are_refused(bad):
    (key,) = bad
    with pytest.raises(ValueError, match=f"{key} must be"):
        RuleConfig(**bad)


def test_a_shifted_model_is_rounded_once():
    """In bfloat16, where three roundings leave an update 4 % off."""
    base = clip().bfloat16()
    merged = finetuned(base, seed=1, scale=0.01)
    scale = 0.3
    for key, value in shifted(base, merged, base, 1 / scale).state_dict().items():
        theta_0 = base.state_dict()[key].double()
        theta = merged.state_dict()[key].double()
        expected = theta_0 + (theta - theta_0) / scale
        error_of_one_rounding = (expected.bfloat16().double() - expected).norm()
        assert (value.double() - expected).norm() <= 1.001 * error_of_one_rounding


def test_a_weight_with_two_names_is_shifted_once():
    base = llama(tie_word_embeddings=True)
    other = finetuned(base, 1)
    moved = shifted(base, other, base, 2.0)
    for key, value in moved.state_dict().items():
        torch.testing.assert_close(value, 2 * other.state_dict()[key] - base.state_dict()[key])


def test_a_continual_method_of_fusionbench_begins_again_and_says_so(tmp_path, caplog):
    models = {name: model.bfloat16() for name, model in pool(3).items()}

    def run(folder, on_step=None):
        done = logging_to(folder, baseline("opcm")).run(models, on_step=on_step)
        manifest = finished_step(folder / "checkpoints" / "merged_model_2").whole()
        return done, manifest["files"]["model.safetensors"]

    whole, files = run(tmp_path / "whole")
    with pytest.raises(InterruptedRunError):
        run(tmp_path / "parts", interrupt_after(2))
    steps = []
    again, files_of_parts = run(tmp_path / "parts", noting(steps))
    assert steps == [1, 2, 3]
    assert "begins with the first model again" in caplog.text
    assert files_of_parts == files
    assert same(whole, again)
    finished, _ = run(tmp_path / "parts", lambda *_: pytest.fail("it was finished"))
    assert same(whole, finished)


@pytest.mark.parametrize("name", ["opcm", "task_arithmetic"])
def test_a_model_that_was_merged_unchecked_and_changed_since_is_not_gone_on_with(tmp_path, name):
    models = pool(3)

    def run(*overrides, on_step=None):
        algorithm = baseline(name, IN_ORDER, "method.check_models=false", *overrides)
        logging_to(tmp_path, algorithm).run(models, on_step=on_step)

    with pytest.raises(InterruptedRunError):
        run(on_step=interrupt_after(2))
    with torch.no_grad():
        next(models["task1"].parameters()).add_(0.01)
    with pytest.raises(ValueError, match="model 'task1' is not the same"):
        run()
