"""How strong the update of `best` is (docs/notes/best.md)."""

import math
from itertools import pairwise

import pytest
import torch

from fusion_bench_nufilt.methods.options import ScaleConfig, SpectralConfig
from fusion_bench_nufilt.methods.spectral import Best, Spectral, TsvStream
from tests.methods.helpers import add, start
from tests.methods.test_spectral import distance, task_vectors


def test_an_option_out_of_its_range_is_refused():
    for scale in (0, -1, float("inf"), "auto", None, True):
        with pytest.raises(ValueError, match="scale must be a number > 0, got"):
            ScaleConfig(scale=scale)
    for key, value in (("kappa", 0), ("damp", -1), ("damp", True), ("ramp", 1), ("ramp", "x")):
        with pytest.raises(ValueError, match=key):
            SpectralConfig(**{key: value})


def state_of(method, taus, strengths=None, dtype=torch.float64):
    theta_0 = torch.zeros(taus[0].shape, dtype=dtype)
    state = start(method, theta_0)
    for tau, strength in zip(taus, strengths or [1.0] * len(taus), strict=True):
        state = add(method, state, theta_0, tau.to(dtype), strength=strength)
    return state


def update(kind, taus, strengths=None, dtype=torch.float64):
    method = kind(kind.Options(), ["layer"])
    return method.merged_update(
        state_of(method, taus, strengths, dtype), method.scale, tuple(taus[0].shape)
    )


def test_a_layer_has_the_mean_strength_of_its_tasks_and_a_single_task_is_taken_whole():
    taus = task_vectors((48, 40), count=2)
    whole = update(Best, taus)
    torch.testing.assert_close(update(Best, taus, [0.5, 0.5]), 0.5 * whole)
    torch.testing.assert_close(update(Best, taus, [1.0, 0.5]), 0.75 * whole)
    torch.testing.assert_close(update(Best, taus[:1], [0.5]), taus[0])


def test_tasks_of_different_strengths_come_in_any_order():
    taus = task_vectors((40, 24), count=3)
    strengths = [1.0, 0.5, 0.8]
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        there = update(Best, taus, strengths, dtype)
        back = update(Best, taus[::-1], strengths[::-1], dtype)
        assert distance(back, there) < tolerance


# --- updates that are short, and tasks that cancel ---


def flat(count=8):
    generator = torch.Generator().manual_seed(3)
    random = torch.randn(count, 48, 40, generator=generator, dtype=torch.float64)
    return list(
        torch.linalg.qr(random).Q
        * torch.rand(count, 1, 1, generator=generator, dtype=torch.float64)
    )


def test_no_member_of_best_has_an_update_that_is_shorter_than_a_sum_of_unrelated_tasks():
    method = Best(ScaleConfig(scale=1.2), ["layer"])
    for tasks, is_short in ((flat(), True), (task_vectors((48, 40), count=8), False)):
        state = state_of(method, tasks)
        length = sum(tau.square().sum() for tau in tasks).sqrt()
        members = [
            member.merged_update(state, member.scale, (48, 40))
            for member in (method.tsv, method.votes)
        ]
        assert [bool(X.norm() < 0.99 * length) for X in members] == [is_short] * 2
        expected = sum(X * max(1.0, length / X.norm()) for X in members) / 2
        torch.testing.assert_close(method.merged_update(state, 1.2, (48, 40)), 1.2 * expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [Best, Spectral], ids=lambda kind: kind.name)
def test_where_tasks_cancel_nothing_moves(kind, dtype):
    tau, other = task_vectors((48, 40), count=2)
    assert update(kind, [tau, -tau], dtype=dtype).norm() < 1e-6 * tau.norm()
    assert update(kind, [tau, other, -tau, -other], dtype=dtype).norm() < 1e-6 * tau.norm()


@pytest.mark.parametrize("kind", [Best, Spectral], ids=lambda kind: kind.name)
def test_the_update_fades_as_a_task_turns_against_another(kind):
    """From unrelated to opposite, at the same length: half the steps change it by half as much."""
    tau, other = task_vectors((48, 40), count=2)
    largest = []
    for count in (20, 40):
        turned = []
        for number in range(count + 1):
            angle = math.pi / 2 * (1 + number / count)
            turned.append(update(kind, [tau, math.cos(angle) * tau + math.sin(angle) * other]))
        assert turned[-1].norm() < 1e-6 * tau.norm()
        steps = [(later - earlier).norm().item() for earlier, later in pairwise(turned)]
        largest.append(max(steps))
    assert largest[1] < 0.6 * largest[0]
    nearly = update(kind, [tau, -tau + 1e-4 * other])
    assert nearly.norm() < 1e-3 * tau.norm()


@pytest.mark.parametrize("rank", [3, None])
def test_a_small_change_of_the_tasks_makes_a_small_change_of_the_update(rank):
    taus = task_vectors((48, 40), count=3, rank=rank)
    noise = task_vectors((48, 40), count=6)[3:]
    before = update(Best, taus)
    for size in (1e-6, 1e-4, 1e-2):
        after = update(Best, [tau + size * each for tau, each in zip(taus, noise, strict=True)])
        assert distance(after, before) < 20 * size


# --- more tasks than directions ---


def test_more_tasks_than_directions_still_move_the_layer_and_change_its_length_little():
    taus = task_vectors((8, 64), count=20)
    lengths = [update(Best, taus[:count]).norm().item() for count in range(5, 21)]
    assert all(0.8 < later / earlier < 1.25 for earlier, later in pairwise(lengths))
    for count in (8, 9, 20):
        least = 0.2 * sum(tau.square().sum() for tau in taus[:count]).sqrt()
        assert update(TsvStream, taus[:count]).norm() > least
        assert lengths[count - 5] > least


def test_of_more_tasks_than_directions_the_strongest_keep_theirs_in_any_order():
    taus = [size * tau for size, tau in zip((5, 1, 4, 2, 3), task_vectors((3, 9), 5), strict=True)]
    expected = update(TsvStream, [taus[0], taus[2], taus[4]])
    for tasks in (taus, taus[::-1]):
        assert distance(update(TsvStream, tasks), expected) < 1e-9
