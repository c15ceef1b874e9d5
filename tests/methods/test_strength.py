"""How strong the update of `best` is (docs/notes/best.md)."""

import math
from itertools import pairwise

import pytest
import torch

from fusion_bench_nufilt.methods import spectral
from fusion_bench_nufilt.methods.options import ScaleConfig, TsvConfig
from fusion_bench_nufilt.methods.spectral import Best, Spectral, TsvStream
from fusion_bench_nufilt.methods.task_vector import (
    FULL_TAIL,
    MOST_ROUNDING,
    NO_TAIL,
    SAMPLED_LAYERS,
    bounded_spectrum,
    spectrum,
    tail,
    task_strength,
)
from fusion_bench_nufilt.nufilt import LowRank
from fusion_bench_nufilt.nufilt.noise import ROUNDING_VARIANCE
from tests.methods.helpers import add, start
from tests.methods.test_spectral import distance, task_vectors
from tests.nufilt.matrices import matrix_with_spectrum


@pytest.mark.parametrize("scale", [0, -1, float("inf"), "auto", None, True])
def test_a_scale_that_is_no_positive_number_is_refused(scale):
    with pytest.raises(ValueError, match="scale must be a number > 0, got"):
        ScaleConfig(scale=scale)


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


# --- the strength of a task, from its whole model ---

WIDE = (128, 128)
NARROW = (32, 128)
SHAPES = [WIDE, NARROW, NARROW, WIDE] * 3  # as the projections of attention with shared keys


def update_of(shape, kind, seed):
    """What fine-tuning changes in a layer, as factors if it was an adapter."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "adapter":
        left = torch.randn(shape[0], 12, generator=generator)
        right = torch.randn(shape[1], 12, generator=generator)
        return LowRank(0.002 * left, right.mT)
    values = 0.1 * torch.arange(1, min(shape) + 1, dtype=torch.float64) ** -0.7
    return matrix_with_spectrum(*shape, values, seed).float()


def strength_of(kind, dtype=None, base_dtype=torch.float32, shapes=SHAPES):
    """The strength of a task that is stored in a dtype, or as factors."""

    def measure(layer, by):
        tau = update_of(shapes[layer], kind, seed=layer)
        if dtype is None:
            return by(tau, 0.0)
        generator = torch.Generator().manual_seed(100 + layer)
        theta_0 = torch.randn(shapes[layer], generator=generator) / 12
        theta_0 = theta_0.to(base_dtype).float()
        if isinstance(tau, LowRank):
            tau = tau.product()
        theta = (theta_0 + tau).to(dtype)
        energy = theta.float().square().sum().item()
        rounding = ROUNDING_VARIANCE * torch.finfo(dtype).eps ** 2 * energy
        return by(theta.float() - theta_0, rounding)

    return task_strength(range(len(shapes)), shapes, measure)


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_has_half_of_the_strength_as_factors_and_merged_in_either_precision(base_dtype):
    assert strength_of("adapter") == 0.5
    assert strength_of("adapter", torch.float32, base_dtype) == 0.5
    assert strength_of("adapter", torch.bfloat16, base_dtype) == 0.5


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_a_full_model_has_all_of_the_strength_in_either_precision(dtype):
    assert strength_of("full", dtype) == 1.0


def test_the_narrow_layers_of_a_model_have_the_strength_of_the_wide_ones():
    """The rank of the adapter is above an eighth of a narrow layer's directions."""
    assert NARROW[0] // 8 < 12
    assert strength_of("adapter", shapes=[WIDE, NARROW, WIDE]) == 0.5


def test_the_strength_grows_evenly_with_what_full_fine_tuning_adds_to_an_adapter():
    low = update_of(WIDE, "adapter", 0).product()
    noise = torch.randn(WIDE, generator=torch.Generator().manual_seed(1))
    noise *= low.norm() / noise.norm()
    strengths = []
    for share in torch.linspace(0, 0.2, 41).tolist():
        found = spectrum(low + share * noise, 0.0)
        strengths.append(task_strength([0], [WIDE], lambda _, by, found=found: found))
    assert strengths[0] == 0.5
    assert strengths[-1] == 1.0
    assert max(later - earlier for earlier, later in pairwise(strengths)) < 0.1
    assert strengths == sorted(strengths)


def test_a_task_that_rounding_hides_has_all_of_the_strength():
    noise = torch.randn(WIDE, generator=torch.Generator().manual_seed(1))
    found = spectrum(noise, rounding=noise.square().sum().item() / 4)
    assert task_strength([0, 1], [WIDE, WIDE], lambda layer, by: [found, None][layer]) == 1.0


@pytest.mark.parametrize("share", [0.02, 0.05, 0.1])
def test_the_tail_is_counted_without_the_energy_of_rounding(share):
    """With it, an adapter that was merged into bfloat16 would have all of the strength."""
    low = update_of(WIDE, "adapter", 0).product()
    noise = torch.randn(WIDE, generator=torch.Generator().manual_seed(1))
    noise *= share**0.5 * low.norm() / noise.norm()
    with_rounding = spectrum(low + noise, rounding=noise.square().sum().item())
    assert tail([with_rounding], 16) < 0.002
    assert task_strength([0], [WIDE], lambda _, by: with_rounding) == 0.5
    assert task_strength([0], [WIDE], lambda _, by: by(low + noise, 0.0)) > 0.9


@pytest.mark.parametrize("power", [0.7, 1.2])
def test_the_strength_makes_no_jump_as_rounding_grows(power):
    """Up to where rounding has two thirds of the energy."""
    values = torch.arange(1, 129, dtype=torch.float64) ** -power
    tau = matrix_with_spectrum(128, 128, values, seed=0)
    expected = task_strength([0], [(128, 128)], lambda _, by: by(tau, 0.0))
    noise = torch.randn(128, 128, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for share in (0.03, 0.1, 0.12, 0.13, 0.2, 0.5, 2.0):
        errors = share**0.5 * tau.norm() / noise.norm() * noise
        stored = spectrum(tau + errors, rounding=errors.square().sum().item())
        strength = task_strength([0], [(128, 128)], lambda _, by, stored=stored: stored)
        assert strength == pytest.approx(expected, abs=0.25), share


def test_the_expected_rounding_is_what_rounding_adds():
    theta = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16):
        stored = theta.to(dtype)
        added = (stored.float() - theta).square().sum().item()
        energy = stored.float().square().sum().item()
        expected = ROUNDING_VARIANCE * torch.finfo(dtype).eps ** 2 * energy
        assert expected == pytest.approx(added, rel=0.03)


def test_a_tail_is_what_lies_outside_the_leading_directions_of_all_layers():
    layers = [matrix_with_spectrum(40, 20, torch.arange(20, 0, -1.0), seed) for seed in range(2)]
    squares = torch.arange(20, 0, -1.0, dtype=torch.float64).square()
    expected = (squares[5:].sum() / squares.sum()).item()
    assert tail([spectrum(each, 0.0) for each in layers], 5) == pytest.approx(expected)


def test_layers_from_all_over_the_model_are_measured_until_enough_were_changed():
    seen = []

    def measure(layer, by):
        seen.append(layer)
        if layer % 7 in (0, 2):
            return by(update_of(WIDE, "adapter", 0), 0.0)
        return None

    assert task_strength(range(700), [WIDE] * 700, measure) == 0.5
    assert sum(layer % 7 in (0, 2) for layer in seen) == SAMPLED_LAYERS
    assert min(seen) < 70
    assert max(seen) > 630


# --- exact spectra only where bounds do not decide ---


def drawn_task(number, dtype):
    """The change of each layer of a task and its rounding, or None for some layers."""
    generator = torch.Generator().manual_seed(number)

    def gaussian(*shape):
        return torch.randn(shape, generator=generator)

    def drawn(*choices):
        return choices[torch.randint(len(choices), (), generator=generator)]

    kind = drawn("adapter", "full", "between", "between", "mixed")
    amount = drawn(0.05, 0.1, 0.12, 0.14, 0.16, 0.18)
    size = drawn(1e-1, 1e-2, 1e-3, 1e-4)  # the last is hidden by rounding to 16 bits
    is_part = drawn(True, False)
    changes = []
    for _ in range(drawn(1, 5, 16)):
        if is_part and drawn(True, False):
            changes.append(None)
            continue
        shape = drawn((64, 64), (160, 64), (64, 96), (16, 64))
        low = gaussian(shape[0], 4) @ gaussian(4, shape[1]) / 2
        values = torch.arange(1, min(shape) + 1) ** -0.6
        full = matrix_with_spectrum(*shape, values, drawn(0, 1, 2)).float()
        full *= low.norm() / full.norm()
        updates = {"adapter": low, "full": full, "between": low + amount * full, "none": 0 * low}
        update = updates[kind if kind in updates else drawn(*updates)]
        theta_0 = (gaussian(*shape) / 12).to(dtype)
        theta = (theta_0.float() + size * update).to(dtype)
        energy = theta.float().square().sum().item()
        rounding = ROUNDING_VARIANCE * torch.finfo(dtype).eps ** 2 * energy
        changes.append((theta.float() - theta_0.float(), rounding))
    return changes


def strength_by(changes, shapes, measured):
    """The strength of a task; the function that measured a layer is noted."""

    def measure(layer, by):
        measured.append(by)
        if changes[layer] is None:
            return None
        return by(*changes[layer])

    return task_strength(range(len(changes)), shapes, measure)


def exact_strength(changes, num_leading):
    """The strength by the exact spectra of all of up to 16 layers."""
    sure, less_sure = [], []
    for layer in sorted(range(len(changes)), key=lambda number: number * 0.618034 % 1):
        if changes[layer] is None:
            continue
        measured = spectrum(*changes[layer])
        if measured.rounding < MOST_ROUNDING * measured.energy:
            sure.append(measured)
        elif measured.rounding < measured.energy:
            less_sure.append(measured)
    if not sure and not less_sure:
        return 1.0
    growth = (tail(sure or less_sure, num_leading) - NO_TAIL) / (FULL_TAIL - NO_TAIL)
    return 0.5 + 0.5 * min(1.0, max(0.0, growth))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_strength_is_bit_for_bit_that_of_exact_spectra_of_all_layers(dtype):
    strengths = []
    for number in range(60):
        changes = drawn_task(number, dtype)
        strength = strength_by(changes, [(64, 64)] * len(changes), [])
        assert strength == exact_strength(changes, num_leading=8), number
        strengths.append(strength)
    assert strengths.count(0.5) > 5
    assert strengths.count(1.0) > 5
    assert len(set(strengths)) > 8


def test_few_exact_spectra_decide_on_a_full_task_and_none_on_one_of_low_rank():
    generator = torch.Generator().manual_seed(1)
    noise = 1e-4 * torch.randn(WIDE, generator=generator)
    low = update_of(WIDE, "adapter", 0).product() + noise
    rounding = noise.square().sum().item()
    measured = []
    assert strength_by([(low, rounding)] * 16, [WIDE] * 16, measured) == 0.5
    assert [by.keywords["count"] for by in measured] == [16] * 16
    full = update_of(WIDE, "full", 0)
    measured = []
    assert strength_by([(full, 0.0)] * 16, [WIDE] * 16, measured) == 1.0
    # The first layer tells that the task is not of low rank.
    assert [by.keywords["count"] for by in measured[:16]] == [16] + [0] * 15
    assert measured[16:] in ([spectrum], [spectrum] * 2, [spectrum] * 3)


def test_no_layer_is_measured_again_whose_spectrum_is_exact():
    """Thin factors, and layers of which the leading directions are more than a fourth."""
    narrow = update_of((40, 64), "full", 0)
    generator = torch.Generator().manual_seed(0)
    factors = LowRank(torch.randn(96, 24, generator=generator), torch.eye(24, 96))
    for tau in (narrow, factors):
        measured = []
        strength = strength_by([(tau, 0.0)], [WIDE], measured)
        assert strength == exact_strength([(tau, 0.0)], 16) > 0.5
        assert spectrum not in measured


def test_layers_with_less_rounding_than_expected_count_before_a_task_has_all_of_the_strength():
    """Without the energy that is expected, less than none of theirs is outside."""
    low = update_of(WIDE, "adapter", 0).product()
    energy = low.square().sum().item()
    noise = torch.randn(WIDE, generator=torch.Generator().manual_seed(1))
    noise *= 0.25 * low.norm() / noise.norm()
    changes = [(low + noise, 0.0), (low, 0.1 * energy)]
    assert strength_by(changes[:1], [WIDE], []) == 1.0
    assert strength_by(changes, [WIDE, WIDE], []) == exact_strength(changes, 16) == 0.5


@pytest.mark.parametrize("shape", [(128, 128), (300, 64), (64, 300)], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("fall", [0.0, -0.5, -2.0, -12.0])
def test_bounds_of_leading_squares_are_below_them(shape, size, fall):
    values = torch.arange(1, min(shape) + 1, dtype=torch.float64) ** fall
    tau = size * matrix_with_spectrum(*shape, values, seed=0).float()
    exact = spectrum(tau, 0.0)
    bounded = bounded_spectrum(tau, 0.0, count=16)
    assert bounded.energy == pytest.approx(exact.energy, rel=1e-12)
    assert len(bounded.squares) == 16
    assert (bounded.squares <= exact.squares[:16]).all()
    for share in (0.0, 0.01, 0.1):
        rounding = share * exact.energy
        most = bounded._replace(rounding=rounding).outside(16)
        assert most >= exact._replace(rounding=rounding).outside(16) >= -rounding


def test_bounds_of_a_task_of_low_rank_have_nearly_all_of_its_energy():
    tau = update_of(WIDE, "adapter", 0).product()
    bounded = bounded_spectrum(tau, 0.0, count=16)
    assert bounded.outside(16) < 0.03 * NO_TAIL * bounded.energy


@pytest.mark.parametrize("limit", [MOST_ROUNDING, 1.0])
def test_where_the_energy_does_not_tell_how_sure_a_layer_is_its_spectrum_is_exact(limit):
    tau = update_of(WIDE, "full", 0)
    exact = spectrum(tau, 0.0)
    for share, is_exact in ((1 - 1e-3, False), (1 - 1e-9, True), (1 + 1e-9, True)):
        bounded = bounded_spectrum(tau, share * limit * exact.energy, count=0)
        assert torch.equal(bounded.squares, exact.squares) == is_exact


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_task_that_is_not_finite_has_no_strength(value):
    tau = torch.full(WIDE, value)
    with pytest.raises(torch.linalg.LinAlgError):
        strength_by([(tau, 0.0)], [WIDE], [])


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
    for count in (40, 80):
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


@pytest.mark.parametrize("low_rank", [False, True])
def test_a_small_change_of_the_tasks_makes_a_small_change_of_the_update(low_rank):
    rank = None
    if low_rank:
        rank = 3
    taus = task_vectors((48, 40), count=3, rank=rank)
    noise = task_vectors((48, 40), count=6)[3:]
    before = update(Best, taus)
    for size in (1e-6, 1e-4, 1e-2):
        after = update(Best, [tau + size * each for tau, each in zip(taus, noise, strict=True)])
        assert distance(after, before) < 20 * size


def test_a_task_of_zero_changes_nothing_whatever_its_strength():
    taus = task_vectors((48, 40), count=2)
    with_zero = update(Best, [taus[0], torch.zeros(48, 40), taus[1]], [1.0, 0.5, 1.0])
    assert torch.equal(with_zero, update(Best, taus))


# --- more tasks than directions ---


@pytest.mark.parametrize("kind", [TsvStream, Best], ids=lambda kind: kind.name)
@pytest.mark.parametrize("count", [8, 9, 20])
def test_more_tasks_than_directions_still_move_the_layer(kind, count):
    taus = task_vectors((8, 64), count=count)
    least = 0.2 * sum(tau.square().sum() for tau in taus).sqrt()
    assert update(kind, taus).norm() > least


def test_of_more_tasks_than_directions_the_strongest_keep_theirs_in_any_order():
    taus = [size * tau for size, tau in zip((5, 1, 4, 2, 3), task_vectors((3, 9), 5), strict=True)]
    strongest = [taus[0], taus[2], taus[4]]
    expected = update(TsvStream, strongest)
    assert distance(update(TsvStream, taus), expected) < 1e-9
    assert distance(update(TsvStream, taus[::-1]), expected) < 1e-9


def test_tasks_that_come_one_by_one_past_the_directions_change_the_length_little():
    taus = task_vectors((8, 64), count=14)
    lengths = [update(Best, taus[:count]).norm().item() for count in range(5, 15)]
    assert all(0.8 < later / earlier < 1.25 for earlier, later in pairwise(lengths))


def test_a_task_past_the_directions_comes_in_as_it_grows():
    *taus, one_more = task_vectors((8, 64), count=9)
    before = update(TsvStream, taus)
    largest = min(torch.linalg.matrix_norm(tau, 2).item() for tau in taus)
    one_more /= torch.linalg.matrix_norm(one_more, 2)
    for size in (1e-6, 0.5, 0.999):
        assert distance(update(TsvStream, [*taus, size * largest * one_more]), before) < 1e-9


@pytest.mark.parametrize("keeps", [(1.0, 0.25), (0.25, 1.0)])
def test_another_keep_from_the_middle_on_cuts_the_earlier_tasks_where_they_are(keeps):
    """The columns of a state are as wide as they were when it was made."""
    taus = task_vectors((48, 40), count=3, rank=3)
    first = TsvStream(TsvConfig(keep=keeps[0]), ["layer"])
    later = TsvStream(TsvConfig(keep=keeps[1]), ["layer"])
    state = state_of(first, taus[:2])
    state = add(later, state, torch.zeros(48, 40, dtype=torch.float64), taus[2])
    expected = later.merged_update(state_of(later, taus), later.scale, (48, 40))
    assert distance(later.merged_update(state, later.scale, (48, 40)), expected) < 1e-6


def test_a_larger_keep_from_the_middle_on_says_that_what_was_cut_cannot_come_back(caplog):
    spectral._warn_once.cache_clear()
    taus = task_vectors((48, 40), count=3)
    later = TsvStream(TsvConfig(keep=0.5), ["layer"])
    same_keep = state_of(later, taus[:2])
    add(later, same_keep, torch.zeros(48, 40, dtype=torch.float64), taus[2])
    assert not caplog.messages
    state = state_of(TsvStream(TsvConfig(keep=0.1), ["layer"]), taus[:2])
    add(later, state, torch.zeros(48, 40, dtype=torch.float64), taus[2])
    (message,) = caplog.messages
    assert "keep=0.5 is larger than it was: earlier tasks have 4 of the 13" in message


def test_a_share_above_one_is_refused():
    with pytest.raises(ValueError, match=r"keep must be at most 1, got 1\.5"):
        TsvConfig(keep=1.5)
