"""Spectral voting: its laws, and as a FusionBench algorithm whose state is kept beside the merged
model.
"""

from copy import deepcopy

import pytest
import torch
from fusion_bench.utils import instantiate

from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.continual.run_folder import finished_step
from fusion_bench_nufilt.methods.base import last_block_numbers
from fusion_bench_nufilt.methods.options import SpectralConfig
from fusion_bench_nufilt.methods.order_free import RTOL, layer_scales
from fusion_bench_nufilt.methods.spectral import Best, Spectral, flatten
from fusion_bench_nufilt.methods.task_vector import TaskVector
from fusion_bench_nufilt.models import select_layers
from fusion_bench_nufilt.nufilt import LowRank
from tests.continual.helpers import InterruptedRunError, interrupt_after, logging_to, pool
from tests.methods.helpers import add, start, weight
from tests.nufilt.matrices import matrix_with_spectrum
from tests.tiny_models import TOWER

KAPPA = 0.9
DAMP = 0.5
SHAPES = [(40, 12), (12, 40), (16, 16)]
SETTINGS = {"layer_method": "spectral", "shuffle_order": False}


def spectrum(rank):
    """Singular values as those of task vectors fall."""
    return 0.3 * torch.arange(1, rank + 1, dtype=torch.float64) ** -0.7


def task_vectors(shape, count=4, rank=None):
    return [
        matrix_with_spectrum(*shape, spectrum(rank or min(shape)), seed) for seed in range(count)
    ]


def method_with(**options):
    return Spectral(SpectralConfig(**options), ["layer"])


def merge(taus, dtype=torch.float64, damp=DAMP):
    """Merge a stream of tasks and return the update of the merged model."""
    shape = taus[0].shape
    ones = torch.ones(min(shape), dtype=torch.float64)
    theta_0 = matrix_with_spectrum(*shape, ones, 99).to(dtype)
    method = method_with(kappa=KAPPA, damp=damp)
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


# --- what the result is ---


@pytest.mark.parametrize("damp", [0.5, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_result_is_that_of_the_definition(shape, damp):
    taus = task_vectors(shape)
    assert distance(merge(taus, damp=damp), by_definition(taus, damp)) < 1e-9


def test_of_low_rank_tasks_nothing_but_their_directions_is_lifted_in_float32():
    taus = task_vectors((48, 40), count=4, rank=3)
    X = merge(taus, torch.float32)
    s = torch.linalg.svdvals(X)
    assert s[11] > 0.1
    assert s[12] < 1e-5
    assert distance(X, by_definition(taus)) < 1e-4


def test_the_first_task_is_taken_whole():
    (tau,) = task_vectors((6, 5), count=1)
    torch.testing.assert_close(merge([tau]), tau)


def test_a_task_that_comes_again_is_held_down_by_n_to_the_damp():
    (tau,) = task_vectors((20, 12), count=1)
    two = torch.linalg.svdvals(merge([tau] * 2))
    eight = torch.linalg.svdvals(merge([tau] * 8))
    assert eight[-1] / two[-1] == pytest.approx(0.5)  # where both are above one vote: (8 / 2)^-0.5


def test_tasks_whose_inputs_and_outputs_are_orthogonal_do_not_disturb_each_other():
    a, b = torch.zeros(2, 20, 16, dtype=torch.float64)
    a[:10, :8], b[10:, 8:] = task_vectors((10, 8), count=2)
    X = merge([a, b])
    assert X[:10, 8:].abs().max() < 1e-10
    assert X[10:, :8].abs().max() < 1e-10
    U, s, Vh = torch.linalg.svd(a[:10, :8], full_matrices=False)
    flattened = flatten((s / s[0]) ** 3, DAMP)
    torch.testing.assert_close(X[:10, :8], KAPPA * 0.3 * U * flattened @ Vh)


def test_the_factors_of_an_update_are_as_good_as_the_weights():
    theta_0 = torch.randn(12, 10)
    left = torch.randn(12, 2)
    right = torch.randn(2, 10)
    method = method_with()
    state = start(method, theta_0)
    by_weight = add(method, state, theta_0, theta_0 + left @ right)
    by_factors = add(method, state, theta_0, LowRank(left, right))
    torch.testing.assert_close(by_weight, by_factors, rtol=0, atol=1e-5)


def test_kappa_grows_with_the_block_and_stacks_of_blocks_are_told_apart():
    names = [
        "embed",
        "encoder.0.q",
        "encoder.1.q",
        "encoder.2.mlp.3.q",
        "decoder.0.q",
        "decoder.1.q",
        "single.0.q",
    ]
    expected = [0.9, 0.54, 0.9, 1.26, 0.54, 1.26, 0.9]
    last = last_block_numbers(names)
    kappas = layer_scales(names, 0.9, 0.4, last)
    assert list(kappas) == names
    assert list(kappas.values()) == pytest.approx(expected)
    assert set(layer_scales(names, 0.9, 0.0, last).values()) == {0.9}


def test_kappa_is_that_of_the_models_block_whichever_blocks_are_merged():
    whole = [f"encoder.{number}.q" for number in range(12)]
    half = whole[:6]
    of_model = last_block_numbers(whole)
    kappas = layer_scales(whole, 0.9, 0.4, of_model)
    assert layer_scales(half, 0.9, 0.4, of_model) == {name: kappas[name] for name in half}


# --- in FusionBench ---


def algorithm_in(folder, **settings):
    return logging_to(folder, LayerwiseMergingAlgorithm(**{**SETTINGS, **settings}))


def saved_pool(folder, models, merged):
    """Return a pool of models that are saved and of a merge of others."""
    for name, model in models.items():
        model.save_pretrained(folder / name)
    paths = {name: str(folder / name) for name in models} | {"_merged_": str(merged)}
    target = compose_run(["modelpool=nufilt_demo"]).modelpool["_target_"]
    return instantiate({"_target_": target, "_recursive_": False, "models": paths})


def test_the_order_of_the_tasks_does_not_matter():
    models = {name: model.double() for name, model in pool().items()}
    shuffled = {**SETTINGS, "shuffle_order": True}
    one = LayerwiseMergingAlgorithm(**shuffled, seed=1).run(models)
    other = LayerwiseMergingAlgorithm(**shuffled, seed=2).run(models)
    base = models["_pretrained_"]
    for view in select_layers(base, "all-linear").values():
        assert distance(view.read(one) - view.read(base), view.read(other) - view.read(base)) < 1e-5


def test_the_depth_ramp_makes_later_blocks_move_more():
    models = pool(2)
    plain = LayerwiseMergingAlgorithm(**SETTINGS, ramp=0.0).run(deepcopy(models))
    ramped = LayerwiseMergingAlgorithm(**SETTINGS, ramp=0.4).run(deepcopy(models))
    for block, factor in ((0, 0.6), (1, 1.4)):
        key = f"{TOWER}encoder.layers.{block}.mlp.fc1.weight"
        theta_0 = models["_pretrained_"].get_parameter(key)
        moved = [(model.get_parameter(key) - theta_0).norm().item() for model in (plain, ramped)]
        assert moved[1] / moved[0] == pytest.approx(factor, rel=1e-4)


@pytest.mark.parametrize("step", [1, 3])
def test_an_interrupted_run_goes_on_with_the_same_bits(tmp_path, step):
    algorithm_in(tmp_path / "whole").run(pool())
    with pytest.raises(InterruptedRunError):
        algorithm_in(tmp_path / "parts").run(pool(), on_step=interrupt_after(step))
    algorithm_in(tmp_path / "parts").run(pool())
    last = [
        finished_step(tmp_path / run / "checkpoints" / "merged_model_3").whole()
        for run in ("whole", "parts")
    ]
    assert last[0]["files"] == last[1]["files"]
    assert "nufilt_state/model.safetensors" in last[0]["files"]


@pytest.mark.slow
def test_a_model_is_merged_onto_an_earlier_merge(tmp_path):
    models = pool()
    whole = algorithm_in(tmp_path / "whole").run(deepcopy(models))
    first = {name: models[name] for name in ("_pretrained_", "task1", "task2", "task3")}
    algorithm_in(tmp_path / "first").run(deepcopy(first))
    rest = {name: models[name] for name in ("_pretrained_", "task4")}
    rest = saved_pool(tmp_path, rest, tmp_path / "first" / "checkpoints" / "merged_model_2")
    merged = algorithm_in(tmp_path / "rest").run(rest)
    for view in select_layers(whole, "all-linear").values():
        assert torch.equal(view.read(merged), view.read(whole))


def test_a_merged_model_without_its_state_is_refused():
    models = pool(2)
    models["_merged_"] = models.pop("task1")
    with pytest.raises(ValueError, match=r"has no .*merges of the same layers only"):
        LayerwiseMergingAlgorithm(**SETTINGS, num_merged=1).run(models)


def test_a_merge_of_other_layers_is_refused(tmp_path):
    """What was merged into layers that are not known to the state would be lost."""
    models = pool(3)
    first = {name: models[name] for name in ("_pretrained_", "task1", "task2")}
    algorithm_in(tmp_path / "fc1", target_modules=["fc1"]).run(first)
    rest = {name: models[name] for name in ("_pretrained_", "task3")}
    rest = saved_pool(tmp_path, rest, tmp_path / "fc1" / "checkpoints" / "merged_model_1")
    with pytest.raises(
        ValueError, match=r"merged_model_1' has no 'encoder.* of the same layers only"
    ):
        algorithm_in(tmp_path / "rest").run(rest)


def test_the_report_of_layers_has_the_votes(tmp_path):
    algorithm_in(tmp_path).run(pool(2))
    header, *rows = (tmp_path / "layers.csv").read_text().splitlines()
    assert header == "step,task,layer,shape,seconds,task_norm,vote_energy,mean,count"
    assert {row.rsplit(",", 1)[1] for row in rows} == {"1", "2"}


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
