"""KnOTS-TIES against a computation of its own, and the laws it obeys."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from fusion_bench.method import TiesMergingAlgorithm
from torch import nn

from fusion_bench_nufilt.baselines.knots import KnotsTiesMergingAlgorithm, knots_ties
from tests.models import clip, finetuned

SHAPES = {"tall": (7, 4), "wide": (3, 8), "bias": (5,), "conv": (2, 3, 2), "scale": ()}


def task_vector(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def oracle_ties(vectors, threshold, merge_func):
    """TIES entry by entry, for vectors of one length. FusionBench keeps one entry more than the per cents say."""
    trimmed = []
    for vector in vectors:
        smallest_kept = sorted(abs(vector), reverse=True)[min(int(len(vector) * threshold / 100), len(vector) - 1)]
        trimmed.append([value if abs(value) >= smallest_kept else 0.0 for value in vector])
    merged = []
    for values in zip(*trimmed, strict=True):
        sign = np.sign(sum(values))
        agreeing = [value for value in values if value * sign > 0] or [0.0]
        join = {"sum": sum, "mean": np.mean, "max": lambda values: max(values, key=abs)}[merge_func]
        merged.append(join(agreeing))
    return np.array(merged)


def oracle(taus, threshold, merge_func):
    taus = [{name: tensor.numpy() for name, tensor in tau.items()} for tau in taus]
    merged, U, aligned = {}, {}, [[] for _ in taus]
    for name in ("tall", "wide"):
        U[name], S, Vh = np.linalg.svd(np.hstack([tau[name] for tau in taus]), full_matrices=False)
        for part, V in zip(aligned, np.split(Vh, len(taus), axis=1), strict=True):
            part.append(np.diag(S) @ V)
    flat = oracle_ties([np.concatenate([matrix.ravel() for matrix in part]) for part in aligned], threshold, merge_func)
    for name, matrix in zip(U, aligned[0], strict=True):
        merged[name] = U[name] @ flat[: matrix.size].reshape(matrix.shape)
        flat = flat[matrix.size :]
    others = ("bias", "conv", "scale")
    flat = oracle_ties([np.concatenate([tau[name].ravel() for name in others]) for tau in taus], threshold, merge_func)
    for name in others:
        merged[name] = flat[: taus[0][name].size].reshape(SHAPES[name])
        flat = flat[taus[0][name].size :]
    return merged


def assert_equal(ours, theirs, tolerance=1e-12):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, torch.as_tensor(theirs[name]), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("merge_func", ["sum", "mean", "max"])
@pytest.mark.parametrize("threshold", [20, 55, 100])
@pytest.mark.parametrize("models", [1, 2, 3])
def test_it_is_what_the_paper_says(models, threshold, merge_func):
    taus = [task_vector(seed) for seed in range(models)]
    ours = knots_ties(taus, threshold=threshold, merge_func=merge_func)
    assert_equal(ours, oracle(taus, threshold, merge_func))


def test_one_task_vector_kept_whole_is_itself():
    tau = task_vector(0)
    assert_equal(knots_ties([tau], threshold=100, merge_func="sum"), tau)


def test_equal_task_vectors_add_up_or_average_to_one():
    tau = task_vector(0)
    one = knots_ties([tau], threshold=20, merge_func="sum")
    assert_equal(knots_ties([tau, tau], threshold=20, merge_func="mean"), one)
    assert_equal(knots_ties([tau, tau], threshold=20, merge_func="sum"), {name: 2 * one[name] for name in one})


def test_the_order_of_the_models_does_not_matter():
    taus = [task_vector(seed) for seed in range(3)]
    forth, back = (knots_ties(each, threshold=20, merge_func="sum") for each in (taus, taus[::-1]))
    assert_equal(forth, back)


def test_a_zero_task_vector_adds_nothing():
    tau = task_vector(0)
    zero = {name: torch.zeros_like(tensor) for name, tensor in tau.items()}
    for merge_func in ("sum", "mean", "max"):
        alone = knots_ties([tau], threshold=20, merge_func=merge_func)
        assert_equal(knots_ties([tau, zero], threshold=20, merge_func=merge_func), alone)
    assert_equal(knots_ties([zero, zero], threshold=20, merge_func="sum"), zero)


def test_the_pretrained_model_is_written_and_returned_and_no_other_changes():
    base = clip()
    pool = {"_pretrained_": deepcopy(base), "one": finetuned(base, 1), "two": finetuned(base, 2)}
    before = {name: deepcopy(model.state_dict()) for name, model in pool.items()}
    merged = KnotsTiesMergingAlgorithm(scaling_factor=0.5, threshold=30, merge_func="mean").run(pool)
    assert merged is pool["_pretrained_"]
    for name in ("one", "two"):
        assert all(torch.equal(value, before[name][key]) for key, value in pool[name].state_dict().items())
    weights = dict(base.named_parameters())
    taus = [{key: pool[name].get_parameter(key) - weight for key, weight in weights.items()} for name in ("one", "two")]
    tau = knots_ties(taus, threshold=30, merge_func="mean")
    for key, value in merged.named_parameters():
        torch.testing.assert_close(value, weights[key] + 0.5 * tau[key])


def test_a_model_without_matrices_is_merged_by_ties_alone():
    class Biases(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(40, generator=torch.Generator().manual_seed(seed)))

    def pool():
        return {"_pretrained_": Biases(0), "one": Biases(1), "two": Biases(2)}

    ties = TiesMergingAlgorithm(scaling_factor=0.3, threshold=20, remove_keys=[], merge_func="sum").run(pool())
    torch.testing.assert_close(KnotsTiesMergingAlgorithm().run(pool()).bias, ties.bias)


def test_half_precision_is_merged_in_single():
    base = clip()
    pool = {"_pretrained_": base, "one": finetuned(base, 1), "two": finetuned(base, 2)}
    half = {name: deepcopy(model).bfloat16() for name, model in pool.items()}
    expected = KnotsTiesMergingAlgorithm().run({name: deepcopy(model).float() for name, model in half.items()})
    merged = KnotsTiesMergingAlgorithm().run(half)
    for key, value in expected.named_parameters():
        assert torch.equal(merged.get_parameter(key), value.bfloat16())


def test_a_model_of_another_shape_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'odd'.*'weight'.*\(3, 2\).*\(2, 2\)"):
        KnotsTiesMergingAlgorithm().run({"_pretrained_": nn.Linear(2, 2), "odd": nn.Linear(2, 3)})


@pytest.mark.parametrize("bad", [{"threshold": 0}, {"threshold": 101}, {"merge_func": "average"}])
def test_values_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}.*{next(iter(bad.values()))}"):
        KnotsTiesMergingAlgorithm(**bad)
