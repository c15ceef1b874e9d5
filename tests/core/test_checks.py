"""Values that are not finite are found, and finite ones are not mistaken for them."""

import pytest
import torch

from fusion_bench_nufilt.core.weights import is_finite


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("extreme", ["max", "min"])
def test_finite_values_are_finite_even_if_their_sum_is_not(dtype, extreme):
    """A causal mask, for instance, is filled with the least number of its dtype."""
    values = torch.full((64, 64), getattr(torch.finfo(dtype), extreme), dtype=dtype)
    assert is_finite(values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [[float("nan")], [float("inf")], [-float("inf")], [float("inf"), -float("inf")]])
def test_a_single_nan_or_infinity_is_seen(dtype, bad):
    values = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
    values[: len(bad)] = torch.tensor(bad)
    assert not is_finite(values)
