"""The continual formulas, against others that are written out for vectors of one layer."""

from functools import reduce

import numpy as np
import pytest
import torch
from lightning import Fabric
from lightning.fabric.loggers import TensorBoardLogger
from torch import nn

from fusion_bench_nufilt.baselines.fusionbench import RuleConfig, shifted
from fusion_bench_nufilt.storage.checkpoint import read_whole_checkpoint
from tests.baselines.test_fusionbench import baseline
from tests.baselines.test_knots import oracle_knots, oracle_ties
from tests.models import clip, finetuned, llama

LAMBDA = 0.4
KEPT = 30  # per cent


def magmax(old, new):
    return np.where(abs(new) >= abs(old), new, old)


def ties(old, new):
    return oracle_ties([old.ravel(), new.ravel()], KEPT, "sum").reshape(old.shape)


def flattened(*taus):
    U, S, V = np.linalg.svd(sum(taus), full_matrices=False)
    return S.mean() * U @ V


def added(join):
    """θ + λ join(τ~, τ)."""
    return lambda taus: reduce(lambda sofar, tau: sofar + LAMBDA * join(sofar, tau), taus[1:], LAMBDA * taus[0])


def running(join):
    """θ + λ T_t, T_t = join(T_{t-1}, τ_t)."""

    def merged(taus):
        results = [taus[0]]
        for tau in taus[1:]:
            results.append(join(results[-1], tau))
        return LAMBDA * sum(results)

    return merged


FORMULAS = {
    ("task_arithmetic", "paper"): lambda taus: LAMBDA * sum(taus),
    ("task_arithmetic", "released"): lambda taus: LAMBDA * taus[-1],
    ("ties_merging", "paper"): running(ties),
    ("ties_merging", "released"): added(ties),
    ("magmax", "paper"): running(magmax),
    ("magmax", "released"): lambda taus: LAMBDA * reduce(magmax, taus),
    ("knots_ties", "paper"): added(lambda old, new: oracle_knots([old, new], KEPT, "sum")),
    ("iso_c", "paper"): lambda taus: reduce(flattened, taus),
}
FACTOR, SHARE = f"method.base_method.scaling_factor={LAMBDA}", f"method.base_method.threshold={KEPT}"
SETTINGS = {
    "task_arithmetic": [FACTOR],
    "ties_merging": [FACTOR, SHARE],
    "magmax": [FACTOR],
    "knots_ties": [FACTOR, SHARE],
    "iso_c": [],
}


class Layer(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.layer = nn.Linear(7, 5, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(("name", "form"), FORMULAS)
def test_a_method_follows_the_formula_of_its_form(name, form, steps):
    models = {"_pretrained_": Layer(0)} | {f"task{i}": Layer(i) for i in range(1, steps + 1)}
    theta_0, *thetas = (model.layer.weight.detach().numpy().copy() for model in models.values())
    merged = baseline(name, f"method.form={form}", "method.shuffle_order=false", *SETTINGS[name]).run(models)
    expected = FORMULAS[name, form]([theta - theta_0 for theta in thetas])
    torch.testing.assert_close(merged.layer.weight.detach().numpy() - theta_0, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["iso_c", "iso_cts", "tsvm", "wudi"])
def test_a_method_without_a_factor_takes_the_first_model_as_it_is(name):
    base = clip()
    first = finetuned(base, 1)
    merged = baseline(name).run({"_pretrained_": base, "first": first})
    assert all(torch.equal(value, first.state_dict()[key]) for key, value in merged.state_dict().items())


@pytest.mark.parametrize("name", ["iso_c", "iso_cts", "tsvm", "wudi", "knots_ties", "opcm", "weight_average", "batch"])
def test_a_method_of_one_form_refuses_the_other(name):
    method = ["+method@method.base_method=simple_average"] if name == "batch" else []
    with pytest.raises(Exception, match=r"this method has one form"):
        baseline(name, "method.form=released", *method)


@pytest.mark.parametrize("bad", [{"form": "printed"}, {"rule": "sum"}, {"merged_scale": 0}, {"merged_scale": "x"}])
def test_values_out_of_range_are_refused(bad):
    (key,) = bad
    with pytest.raises(ValueError, match=f"{key} must be"):
        RuleConfig(**bad)


def test_a_shifted_model_is_rounded_once():
    """In bfloat16, where three roundings leave an update 4 % off."""
    base = clip().bfloat16()
    merged, scale = finetuned(base, seed=1, scale=0.01), 0.3
    theta_0, theta = ({key: value.double() for key, value in m.state_dict().items()} for m in (base, merged))
    for key, value in shifted(base, merged, base, 1 / scale).state_dict().items():
        expected = theta_0[key] + (theta[key] - theta_0[key]) / scale
        once = (expected.bfloat16().double() - expected).norm()
        assert (value.double() - expected).norm() <= 1.001 * once


def test_a_weight_with_two_names_is_shifted_once():
    base = llama(tie_word_embeddings=True)
    other = finetuned(base, 1)
    moved = shifted(base, other, base, 2.0)
    for key, value in moved.state_dict().items():
        torch.testing.assert_close(value, 2 * other.state_dict()[key] - base.state_dict()[key])


def test_a_running_result_goes_on_with_the_same_bits(tmp_path):
    base = clip()
    models = {"_pretrained_": base} | {f"task{i}": finetuned(base, seed=i) for i in (1, 2, 3, 4)}

    def run(folder, *overrides, stop=None):
        algorithm = baseline("magmax", "method.form=paper", "method.shuffle_order=false", *overrides)
        algorithm._fabric_instance = Fabric(devices=1, accelerator="cpu", loggers=TensorBoardLogger(folder, "", ""))
        algorithm.run(models, on_step=lambda step: step == stop and pytest.fail("interrupted"))
        return read_whole_checkpoint(folder / "checkpoints" / "merged_model_3")["files"]

    whole = run(tmp_path / "whole")
    for step in (1, 3):
        with pytest.raises(pytest.fail.Exception, match="interrupted"):
            run(tmp_path / "parts", stop=step)
        assert run(tmp_path / "parts", "method.resume=true") == whole


def test_a_running_result_is_not_in_a_merged_model():
    base = clip()
    pool = {"_pretrained_": base, "_merged_": finetuned(base, 1), "task": finetuned(base, 2)}
    with pytest.raises(ValueError, match=r"add_running.*_merged_"):
        baseline("ties_merging", "method.num_merged=1").run(pool)
