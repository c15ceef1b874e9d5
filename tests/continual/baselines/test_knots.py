"""KnOTS-TIES against a computation of its own, and the laws it obeys."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from fusion_bench import BaseModelPool
from torch import nn

from fusion_bench_nufilt.continual.baselines.knots import KnotsTiesMergingAlgorithm, knots_ties
from tests.continual.baselines.helpers import unchanged
from tests.pairs import pairs
from tests.tiny_models import clip, damaged_clip, finetuned

SHAPES = [(7, 4), (3, 8)]


def task_vector(seed, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def oracle_ties(vectors, threshold, merge_func):
    """TIES entry by entry, for vectors of one length. FusionBench keeps one entry more than the per
    cents say.
    """
    trimmed = []
    for vector in vectors:
        last_kept = min(int(len(vector) * threshold / 100), len(vector) - 1)
        smallest_kept = sorted(abs(vector), reverse=True)[last_kept]
        trimmed.append(np.where(abs(vector) >= smallest_kept, vector, 0.0))
    merged = []
    for values in zip(*trimmed, strict=True):
        sign = np.sign(sum(values))
        agreeing = [value for value in values if value * sign > 0] or [0.0]
        join = {"sum": sum, "mean": np.mean, "max": lambda values: max(values, key=abs)}[merge_func]
        merged.append(join(agreeing))
    return np.array(merged)


def oracle_knots(taus, threshold, merge_func):
    U, S, Vh = np.linalg.svd(np.hstack(taus), full_matrices=False)
    used = S > 1e-5
    parts = np.split(Vh[used], len(taus), axis=1)
    merged = oracle_ties([part.ravel() for part in parts], threshold, merge_func)
    return U[:, used] @ np.diag(S[used]) @ merged.reshape(parts[0].shape)


@pytest.mark.parametrize(
    ("shape", "models", "threshold", "merge_func"),
    pairs(SHAPES, [1, 2, 3], [20, 55, 100], ["sum", "mean", "max"]),
)
def test_it_is_the_formula(shape, models, threshold, merge_func):
    taus = [task_vector(seed, shape) for seed in range(models)]
    expected = oracle_knots([tau.numpy() for tau in taus], threshold, merge_func)
    torch.testing.assert_close(knots_ties(taus, threshold, merge_func), torch.from_numpy(expected))


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_updates_add_up_or_average_to_one(shape):
    tau = task_vector(0, shape)
    torch.testing.assert_close(knots_ties([tau, tau], 100, "mean"), tau)
    torch.testing.assert_close(knots_ties([tau, tau], 100, "sum"), 2 * tau)


def test_a_zero_update_adds_nothing():
    tau = task_vector(0, (7, 4))
    zero = torch.zeros_like(tau)
    torch.testing.assert_close(knots_ties([tau, zero], 20, "sum"), knots_ties([tau], 20, "sum"))
    assert torch.equal(knots_ties([zero, zero], 20, "sum"), zero)


def pool_of(base):
    return {"_pretrained_": deepcopy(base), "one": finetuned(base, 1), "two": finetuned(base, 2)}


def test_linear_layers_of_the_pretrained_model_are_written_and_nothing_else():
    base = clip()
    pool = pool_of(base)
    states = [dict(model.named_parameters()) for model in (base, pool["one"], pool["two"])]
    with unchanged({name: pool[name] for name in ("one", "two")}):
        merged = KnotsTiesMergingAlgorithm(scaling_factor=0.5, threshold=30, merge_func="mean").run(
            pool
        )
    assert merged is pool["_pretrained_"]
    linear = {
        f"{name}.weight" for name, module in base.named_modules() if isinstance(module, nn.Linear)
    }
    for key, value in merged.named_parameters():
        theta_0, one, two = [state[key] for state in states]
        if key in linear:
            torch.testing.assert_close(
                value, theta_0 + 0.5 * knots_ties([one - theta_0, two - theta_0], 30, "mean")
            )
        else:
            assert torch.equal(value, theta_0)


def test_a_single_model_is_kept_whole():
    base = nn.Linear(6, 4)
    model = finetuned(base, 1)
    merged = KnotsTiesMergingAlgorithm(scaling_factor=0.5).run(
        {"_pretrained_": deepcopy(base), "one": model}
    )
    torch.testing.assert_close(merged.weight, (base.weight + model.weight) / 2)


def test_a_model_of_another_shape_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'odd'.*'weight'.*\(3, 2\).*\(2, 2\)"):
        KnotsTiesMergingAlgorithm().run({"_pretrained_": nn.Linear(2, 2), "odd": nn.Linear(2, 3)})


@pytest.mark.parametrize("bad", [{"threshold": 0}, {"threshold": 101}, {"merge_func": "average"}])
def test_values_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}.*{next(iter(bad.values()))}"):
        KnotsTiesMergingAlgorithm(**bad)


def test_singular_values_are_cut_where_fusion_bench_cuts_them():
    small = torch.zeros(4, 4)
    small[0, 0] = 0.9e-4
    large = torch.zeros(4, 4)
    large[0, 0] = 1.1e-4
    assert not knots_ties([small, torch.zeros(4, 4)], 100, "sum").any()
    assert knots_ties([large, torch.zeros(4, 4)], 100, "sum").any()


@pytest.mark.parametrize("damaged", ["_pretrained_", "a"])
def test_a_weight_that_was_drawn_at_random_is_refused_by_name(tmp_path, damaged):
    entry, key = damaged_clip(tmp_path)
    models = BaseModelPool({"_pretrained_": clip(), "a": clip(1), damaged: entry})
    with pytest.raises(ValueError, match=rf"model '{damaged}': its checkpoint lacks '{key}'"):
        KnotsTiesMergingAlgorithm().run(models)
