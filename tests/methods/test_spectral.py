"""Spectral voting: its definition, by full decompositions, and what it is made of."""

import pytest
import torch

from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.methods.base import last_block_numbers
from fusion_bench_nufilt.methods.options import SpectralConfig
from fusion_bench_nufilt.methods.order_free import RTOL
from fusion_bench_nufilt.methods.spectral import Best, Spectral, flatten
from fusion_bench_nufilt.methods.task_vector import TaskVector
from tests.continual.helpers import logging_to, pool
from tests.methods.helpers import add, start, weight
from tests.nufilt.matrices import matrix_with_spectrum

KAPPA = 0.9
DAMP = 0.5


def spectrum(rank):
    """Singular values as those of task vectors fall."""
    return 0.3 * torch.arange(1, rank + 1, dtype=torch.float64) ** -0.7


def task_vectors(shape, count=4, rank=None):
    return [
        matrix_with_spectrum(*shape, spectrum(rank or min(shape)), seed) for seed in range(count)
    ]


def merge(taus, dtype=torch.float64, damp=DAMP):
    """Merge a stream of tasks and return the update of the merged model."""
    shape = taus[0].shape
    ones = torch.ones(min(shape), dtype=torch.float64)
    theta_0 = matrix_with_spectrum(*shape, ones, 99).to(dtype)
    method = Spectral(SpectralConfig(kappa=KAPPA, damp=damp), ["layer"])
    state = start(method, theta_0)
    for tau in taus:
        state = add(method, state, theta_0, (theta_0 + tau).to(dtype))
    return weight(method, state, theta_0).double() - theta_0.double()


def by_definition(taus, damp=DAMP):
    """Compute the merged update by full singular value decompositions."""
    S = torch.zeros_like(taus[0])
    s_1 = []
    for tau in taus:
        U, s, Vh = torch.linalg.svd(tau, full_matrices=False)
        S += U * (s / s[0]) ** 3 @ Vh
        s_1.append(s[0])
    U, sigma, Vh = torch.linalg.svd(S, full_matrices=False)
    q = flatten(sigma, damp) * (sigma > RTOL * sigma[0])
    return KAPPA * sum(s_1) / len(taus) * U * q @ Vh


def distance(X, Y):
    return ((X - Y).norm() / Y.norm()).item()


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (16, 16)])
def test_the_result_is_that_of_the_definition(shape):
    """Also of tasks that come again, which are held down by their number to the damp, and of few
    directions, beside which float32 lifts nothing.
    """
    taus = [size * tau for size, tau in zip((1, 2, 0.5, 3), task_vectors(shape), strict=True)]
    few = task_vectors(shape, rank=2)
    for damp in (0.5, 1.0):
        for tasks in (taus, 8 * taus[:1], few):
            expected = by_definition(tasks, damp)
            assert distance(merge(tasks, torch.float64, damp), expected) < 1e-9
            assert distance(merge(tasks, torch.float32, damp), expected) < 1e-4


def test_the_first_task_is_taken_whole():
    (tau,) = task_vectors((6, 5), count=1)
    torch.testing.assert_close(merge([tau]), tau)


def test_kappa_grows_with_the_models_blocks_whichever_are_merged_and_stacks_are_told_apart():
    expected = {
        "embed": 0.9,
        "encoder.0.q": 0.54,
        "encoder.1.q": 0.9,
        "encoder.2.mlp.3.q": 1.26,
        "decoder.0.q": 0.54,
        "decoder.1.q": 1.26,
        "single.0.q": 0.9,
    }
    last = last_block_numbers(list(expected))
    for names in (list(expected), list(expected)[:2]):
        for ramp, kappas in ((0.4, expected), (0.0, dict.fromkeys(expected, 0.9))):
            method = Spectral(SpectralConfig(kappa=0.9, ramp=ramp), names, last_blocks=last)
            found = {name: method.scale_of(name) for name in names}
            assert found == pytest.approx({name: kappas[name] for name in names})


def test_a_run_reports_votes_and_goes_on_from_no_merge_in_memory_without_them(tmp_path):
    models = pool(2)
    logging_to(tmp_path, LayerwiseMergingAlgorithm("spectral")).run(models)
    header, *rows = (tmp_path / "layers.csv").read_text().splitlines()
    assert header == "step,task,layer,shape,seconds,task_norm,vote_energy,mean,count"
    assert {row.rsplit(",", 1)[1] for row in rows} == {"1", "2"}
    models["_merged_"] = models.pop("task1")
    with pytest.raises(ValueError, match=r"has no .*merges of the same layers only"):
        LayerwiseMergingAlgorithm("spectral", num_merged=1).run(models)


@pytest.mark.parametrize("power", [0.1, 2.0])
def test_a_rough_vote_has_all_directions_that_count(power):
    """All of them in a nearly flat spectrum, and the leading ones in a steep one."""
    values = torch.arange(1, 49, dtype=torch.float64) ** -power
    task = TaskVector(matrix_with_spectrum(64, 48, values, seed=1))
    vote, s_1 = task.vote()
    rough_vote, rough_s_1 = task.rough_vote(1e-4)
    assert torch.linalg.matrix_norm(rough_vote - vote, ord=2) < 1e-4
    assert rough_s_1.item() == pytest.approx(s_1.item())


def test_the_strength_of_a_direction_falls_a_little_up_to_a_vote_and_then_with_damp():
    sigma = torch.tensor([4.0, 1.0, 0.5, 0.0], dtype=torch.float64)
    expected = torch.tensor([0.5, 1.0, 1.015, 1.03], dtype=torch.float64)
    torch.testing.assert_close(flatten(sigma, 0.5), expected)


@pytest.mark.parametrize("shape", [(160, 128), (128, 160)])
def test_best_finds_the_votes_that_count_in_the_directions_that_it_keeps(shape, monkeypatch):
    """A search among all was nearly half of the time of large layers, with the same result."""
    values = torch.arange(1, 129, dtype=torch.float64) ** -1.5
    taus = [matrix_with_spectrum(*shape, values, seed).float() for seed in (1, 2)]
    method = Best(Best.Options(), ["layer"])
    theta_0 = torch.zeros(shape)
    state = start(method, theta_0)
    for tau in taus:
        state = add(method, state, theta_0, tau)
    assert method.directions_of_votes(state).shape[1] < 32
    update = method.merged_update(state, 1.0, shape)
    monkeypatch.setattr(method, "directions_of_votes", lambda state: None)
    assert distance(update, method.merged_update(state, 1.0, shape)) < 1e-3
