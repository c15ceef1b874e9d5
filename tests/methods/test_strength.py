"""The strength that a method finds for a whole merge (docs/notes/strength.md)."""

import itertools
from math import exp, hypot, log

import pytest
import torch

from fusion_bench_nufilt.methods.best import Best
from fusion_bench_nufilt.methods.order_free import AutoScaleConfig
from fusion_bench_nufilt.methods.strength import find_strength
from fusion_bench_nufilt.methods.tsv import TsvStream
from tests.methods.test_spectral import task_vectors

LAYERS = {"blocks.0.wide": (12, 40), "blocks.1.tall": (40, 12), "blocks.1.square": (16, 16)}
every_method = pytest.mark.parametrize("kind", [TsvStream, Best], ids=lambda kind: kind.name)


def tasks_of(layers=LAYERS, count=3):
    return {name: task_vectors(shape, count=count) for name, shape in layers.items()}


def bases(layers=LAYERS):
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in layers.items()}


def measured(kind, tasks, base, **options):
    """The updates and measures of all layers, by layer."""
    method, found = kind(AutoScaleConfig(scale="auto", **options), list(tasks)), {}
    for layer, taus in tasks.items():
        state = method.start(layer, base[layer])
        for tau in taus:
            state = method.add(layer, state, base[layer], tau)
        found[layer] = method.measured_update(layer, state, base[layer])
    return found


def strength(*arguments, **options):
    return find_strength([measure for _, measure in measured(*arguments, **options).values()])


@every_method
def test_the_strength_follows_the_formula(kind):
    tasks, base = tasks_of(), bases()
    found = measured(kind, tasks, base, ramp=0.4)
    kept = energy = 0.0
    shares = []
    for layer, (X, _) in found.items():
        shares.append((X.norm() / base[layer].norm()).item())
        for tau in tasks[layer]:
            U, s, Vh = torch.linalg.svd(tau, full_matrices=False)
            n = min(tau.shape) // (3 if kind is TsvStream else 8)
            kept += ((U[:, :n] * s[:n]) @ Vh[:n] * X).sum().item()
            energy += tau.square().sum().item()
    c, m = kept / energy, exp(sum(map(log, shares)) / 3)
    result = find_strength([measure for _, measure in found.values()])
    assert result["kept"] == pytest.approx(c, rel=1e-3)  # directions are kept in half of the precision
    assert (result["moved"], result["scale"]) == pytest.approx((m, 1 / hypot(c, m / 0.28)), rel=1e-3)


@every_method
def test_the_strength_does_not_depend_on_the_order_of_the_tasks(kind):
    tasks, base = tasks_of(), bases()
    orders = itertools.permutations(range(3))
    scales = [
        strength(kind, {layer: [taus[i] for i in order] for layer, taus in tasks.items()}, base)["scale"]
        for order in orders
    ]
    assert scales == pytest.approx(scales[:1] * 6, rel=1e-3)


def test_a_single_task_is_merged_at_strength_1():
    assert strength(TsvStream, tasks_of(count=1), bases())["scale"] == 1


def test_a_layer_that_no_task_moved_does_not_count():
    tasks, base = tasks_of(), bases()
    expected = strength(Best, tasks, base)
    still = torch.zeros(16, 16, dtype=torch.float64)
    tasks["blocks.1.still"], base["blocks.1.still"] = [still] * 3, still + 1
    assert strength(Best, tasks, base) == pytest.approx(expected)
    assert strength(Best, {"still": [still] * 3}, {"still": still + 1})["scale"] == 1


def test_larger_tasks_are_merged_at_a_lower_strength_and_a_layer_without_a_base_does_not_count():
    tasks, base = tasks_of(), bases()
    scales = [
        strength(Best, {layer: [by * tau for tau in taus] for layer, taus in tasks.items()}, base)["scale"]
        for by in (0.01, 1, 100)
    ]
    assert scales[0] > scales[1] > scales[2]
    base["blocks.1.square"] = torch.zeros(16, 16, dtype=torch.float64)
    assert strength(Best, tasks, base)["scale"] > 0


@pytest.mark.parametrize("scale", [0, -1, float("inf"), "automatic", None, True])
def test_any_other_scale_is_refused(scale):
    with pytest.raises(ValueError, match="scale must be a number > 0 or auto, got"):
        AutoScaleConfig(scale=scale)


def adapters(count=2):
    return task_vectors((48, 40), count=count, rank=3)


def test_best_gives_tasks_of_low_rank_half_of_the_strength_and_a_layer_the_mean_of_its_tasks():
    full, low = task_vectors((48, 40), count=2), adapters()
    method, theta_0 = Best(AutoScaleConfig(), ["layer"]), torch.zeros(48, 40, dtype=torch.float64)
    for tasks, expected in ((full, 1.0), (low, 0.5), ([full[0], low[0]], 0.75), ([low[0]], 1.0)):
        state = method.start("layer", theta_0)
        for tau in tasks:
            state = method.add("layer", state, theta_0, tau)
        whole = method.update({**state, "low_rank": torch.tensor(0.0)}, 1.0)
        torch.testing.assert_close(method.update(state, 1.0), expected * whole)


def test_adapters_never_get_more_strength_from_auto():
    base = {"layer": torch.randn(48, 40, dtype=torch.float64)}
    measures = [each for _, each in measured(Best, {"layer": [1e-3 * tau for tau in adapters(count=4)]}, base).values()]
    assert find_strength([{**each, "low_rank": 0} for each in measures])["scale"] > 1
    assert find_strength(measures)["scale"] == 1


def flat(count=8):
    generator = torch.Generator().manual_seed(3)
    random = torch.randn(count, 48, 40, generator=generator, dtype=torch.float64)
    return list(torch.linalg.qr(random).Q * torch.rand(count, 1, 1, generator=generator, dtype=torch.float64))


def test_no_member_of_best_has_an_update_that_is_shorter_than_a_sum_of_unrelated_tasks():
    method, theta_0 = Best(AutoScaleConfig(scale=1.2), ["layer"]), torch.zeros(48, 40, dtype=torch.float64)
    for tasks, is_short in ((flat(), True), (task_vectors((48, 40), count=8), False)):
        state = method.start("layer", theta_0)
        for tau in tasks:
            state = method.add("layer", state, theta_0, tau)
        length = sum(tau.square().sum() for tau in tasks).sqrt()
        members = [member.update(state, member.scale) for member in method.members]
        assert [bool(X.norm() < 0.99 * length) for X in members] == [is_short] * 2
        expected = sum(X * max(1.0, length / X.norm()) for X in members) / 2
        torch.testing.assert_close(method.update(state, 1.2), 1.2 * expected)
