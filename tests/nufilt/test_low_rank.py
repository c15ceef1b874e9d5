"""A task given by its factors is the task given by its weight."""

from dataclasses import astuple, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion_bench_nufilt import fuse_layers
from fusion_bench_nufilt.nufilt import FusionConfig, LowRank
from tests.nufilt.matrices import random_layer

CONFIG = FusionConfig(null_rank=6, lora_rank=4, task_rank=3, lr=1e-2, max_steps=5)


def low_rank(d_o, d_i, rank, seed):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(d_o, rank, generator=generator, dtype=torch.float64)
    right = torch.randn(rank, d_i, generator=generator, dtype=torch.float64)
    return LowRank(0.1 * left, 0.1 * right)


def both(theta_0, theta, factors, config=CONFIG):
    """Return new weight and report from the factors, and from their product."""
    results = []
    for task in (factors, theta_0 + factors.product()):
        fused, reports = fuse_layers({"w": theta_0}, {"w": theta}, {"w": task}, config, step=2)
        results.append((fused["w"], reports["w"]))
    return results


@given(
    st.integers(1, 24),
    st.integers(1, 24),
    st.integers(1, 30),  # thin factors, and such that are no shorter than the matrix
    st.integers(0, 2**16),
    st.sampled_from([True, False, "zero"]),
    st.sampled_from(["paper", "release"]),
    st.booleans(),
    st.integers(0, 5),
    st.sampled_from(["adam", "closed_form"]),
)
def test_factors_give_the_weights_and_reports_of_their_product(
    d_o, d_i, rank, seed, null_space, first_task, fresh, task_rank, solver
):
    theta_0, theta, _ = random_layer(d_o, d_i, seed)
    # Beyond the factors' rank their product has directions too: its rounding.
    task_rank = min(task_rank, rank)
    config = replace(
        CONFIG, null_space=null_space, first_task=first_task, task_rank=task_rank, solver=solver
    )
    factors = low_rank(d_o, d_i, rank, seed)
    if fresh:
        theta = theta_0
    (weight, report), (expected, expected_report) = both(theta_0, theta, factors, config)
    tolerance = 1e-9 * factors.product().norm().item()
    torch.testing.assert_close(weight, expected, rtol=0, atol=tolerance)
    for ours, plain in zip(astuple(report)[3:], astuple(expected_report)[3:], strict=True):
        assert ours == pytest.approx(plain, rel=1e-9, abs=1e-12)


def test_the_product_of_factors_in_bfloat16_has_the_digits_of_float32():
    factors = low_rank(20, 12, 3, seed=0).to(torch.bfloat16)
    exact = factors.to(torch.float64).product()
    assert (factors.product() - exact).norm() < 1e-6 * exact.norm()


def test_factors_that_do_not_fit_are_refused_with_their_shapes():
    theta_0, theta, _ = random_layer(20, 12, seed=0)
    with pytest.raises(
        ValueError, match=r"factors of shapes \(20, 2\) and \(3, 12\) have no product"
    ):
        LowRank(torch.zeros(20, 2), torch.zeros(3, 12))
    for factors, message in [
        (
            LowRank(torch.zeros(20, 2), torch.zeros(2, 13)),
            r"shape \(20, 13\) differs .* \(20, 12\)",
        ),
        (LowRank(torch.full((20, 2), float("nan")), torch.zeros(2, 12)), "NaN or infinite"),
        (LowRank(torch.zeros(20, 2).int(), torch.zeros(2, 12)), "expected a floating-point matrix"),
    ]:
        with pytest.raises(ValueError, match=f"model 'task', layer 'w': .*{message}"):
            fuse_layers({"w": theta_0}, {"w": theta}, {"w": factors}, CONFIG)


def test_updates_that_are_kept_as_factors_are_those_of_whole_weights():
    """Three steps on a base of rank 0, whose result is factors of the sum of the ranks."""
    shapes = {"tall": (40, 16), "wide": (16, 40), "thick": (12, 10)}
    nothing = {name: low_rank(*shape, 0, 0) for name, shape in shapes.items()}
    zeros = {name: update.product() for name, update in nothing.items()}
    merged, whole = nothing, zeros
    for step, rank in enumerate((3, 2, 4), start=1):
        task = {name: low_rank(*shape, rank, step) for name, shape in shapes.items()}
        merged, reports = fuse_layers(nothing, merged, task, CONFIG, step=step)
        whole, expected = fuse_layers(zeros, whole, task, CONFIG, step=step)
    for name, shape in shapes.items():
        assert isinstance(merged[name], LowRank)
        assert merged[name].rank == min(9, shape[0])
        torch.testing.assert_close(merged[name].product(), whole[name], rtol=0, atol=1e-12)
        assert reports[name].shape == shape
        assert reports[name].filtered_share == pytest.approx(expected[name].filtered_share)


def test_a_layer_that_is_given_by_factors_in_one_model_alone_is_refused():
    nothing = {"w": low_rank(8, 6, 0, 0)}
    task = {"w": low_rank(8, 6, 2, 1)}
    for pretrained, merged, new in (
        (nothing, nothing, {"w": torch.ones(8, 6)}),
        ({"w": torch.zeros(8, 6)}, nothing, task),
        (nothing, nothing, nothing),
    ):
        with pytest.raises(ValueError, match="layer 'w': where the pretrained or the merged"):
            fuse_layers(pretrained, merged, new, CONFIG)
