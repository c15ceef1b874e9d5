"""The strength of a task, from its whole model (docs/notes/best.md)."""

import math
from itertools import pairwise

import pytest
import torch

from fusion_bench_nufilt.merge.strength import SAMPLED_LAYERS, spectrum, tail, task_strength
from fusion_bench_nufilt.nufilt import LowRank
from tests.nufilt.matrices import matrix_with_spectrum

WIDE = (128, 128)
NARROW = (32, 128)


def adapter(shape, seed):
    """The factors of an adapter's update."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(shape[0], 12, generator=generator)
    right = torch.randn(shape[1], 12, generator=generator)
    return LowRank(0.002 * left, right.mT)


def strength_by(measure, shapes):
    """The strength of a task of layers of these shapes, which a function measures by number."""
    return task_strength(range(len(shapes)), shapes, lambda sample: map(measure, sample))


def test_the_narrow_layers_of_a_model_have_the_strength_of_the_wide_ones():
    """The rank of the adapter is above an eighth of a narrow layer's directions."""
    assert NARROW[0] // 8 < 12
    shapes = [WIDE, NARROW, WIDE]
    assert strength_by(lambda layer: spectrum(adapter(shapes[layer], layer), 0.0), shapes) == 0.5


def test_the_strength_grows_evenly_with_what_full_fine_tuning_adds_to_an_adapter():
    low = adapter(WIDE, 0).product()
    noise = torch.randn(WIDE, generator=torch.Generator().manual_seed(1))
    noise *= low.norm() / noise.norm()
    strengths = []
    for share in torch.linspace(0, 0.2, 41).tolist():
        found = spectrum(low + share * noise, 0.0)
        strengths.append(strength_by(lambda _, found=found: found, [WIDE]))
    assert strengths[0] == 0.5
    assert strengths[-1] == 1.0
    assert max(later - earlier for earlier, later in pairwise(strengths)) < 0.1
    assert strengths == sorted(strengths)


def test_a_task_that_rounding_hides_has_all_of_the_strength():
    noise = torch.randn(WIDE, generator=torch.Generator().manual_seed(1))
    found = spectrum(noise, rounding=noise.square().sum().item() / 4)
    assert strength_by(lambda layer: [found, None][layer], [WIDE, WIDE]) == 1.0


@pytest.mark.parametrize("share", [0.02, 0.05, 0.1])
def test_the_tail_is_counted_without_the_energy_of_rounding(share):
    """With it, an adapter that was merged into bfloat16 would have all of the strength."""
    low = adapter(WIDE, 0).product()
    noise = torch.randn(WIDE, generator=torch.Generator().manual_seed(1))
    noise *= share**0.5 * low.norm() / noise.norm()
    with_rounding = spectrum(low + noise, rounding=noise.square().sum().item())
    assert tail([with_rounding], 16) < 0.002
    assert strength_by(lambda _: with_rounding, [WIDE]) == 0.5
    assert strength_by(lambda _: spectrum(low + noise, 0.0), [WIDE]) > 0.9


@pytest.mark.parametrize("power", [0.7, 1.2])
def test_the_strength_makes_no_jump_as_rounding_grows(power):
    """Up to where rounding has two thirds of the energy."""
    values = torch.arange(1, 129, dtype=torch.float64) ** -power
    tau = matrix_with_spectrum(128, 128, values, seed=0)
    expected = strength_by(lambda _: spectrum(tau, 0.0), [WIDE])
    noise = torch.randn(128, 128, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for share in (0.03, 0.1, 0.12, 0.13, 0.2, 0.5, 2.0):
        errors = share**0.5 * tau.norm() / noise.norm() * noise
        stored = spectrum(tau + errors, rounding=errors.square().sum().item())
        strength = strength_by(lambda _, stored=stored: stored, [WIDE])
        assert strength == pytest.approx(expected, abs=0.25), share


def test_a_tail_is_what_lies_outside_the_leading_directions_of_all_layers():
    layers = [matrix_with_spectrum(40, 20, torch.arange(20, 0, -1.0), seed) for seed in range(2)]
    squares = torch.arange(20, 0, -1.0, dtype=torch.float64).square()
    expected = (squares[5:].sum() / squares.sum()).item()
    assert tail([spectrum(each, 0.0) for each in layers], 5) == pytest.approx(expected)


def test_layers_from_all_over_the_model_are_measured_until_enough_were_changed():
    seen = []

    def measure(layer):
        seen.append(layer)
        if layer % 7 in (0, 2):
            return spectrum(adapter(WIDE, 0), 0.0)
        return None

    assert strength_by(measure, [WIDE] * 700) == 0.5
    assert sum(layer % 7 in (0, 2) for layer in seen) == SAMPLED_LAYERS
    assert min(seen) < 70
    assert max(seen) > 630


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_task_that_is_not_finite_has_no_strength(value):
    with pytest.raises(torch.linalg.LinAlgError):
        spectrum(torch.full(WIDE, value), 0.0)


def test_a_model_whose_layers_are_all_rounding_is_not_measured_as_a_whole():
    seen = []

    def measure(layer):
        seen.append(layer)
        return spectrum(torch.eye(8), rounding=9.0)

    assert strength_by(measure, [WIDE] * 700) == 1.0
    assert len(seen) < 70
