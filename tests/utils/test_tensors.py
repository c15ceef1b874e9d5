"""safetensors files that are read tensor by tensor."""

import json

import psutil
import pytest
import torch

from fusion_bench_nufilt.utils.tensors import TensorFile, is_finite

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def test_a_file_larger_than_memory_is_opened_without_reserving_it(tmp_path):
    """A sparse file: its size is only said."""
    numel = psutil.virtual_memory().total + psutil.swap_memory().total  # of two bytes each
    tensor = {"dtype": "BF16", "shape": [numel], "data_offsets": [0, 2 * numel]}
    header = json.dumps({"w": tensor}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(8 + len(header) + 2 * numel)
        except OSError:
            pytest.skip("no sparse files on this disk")
    opened = TensorFile(tmp_path / "model.safetensors")
    last_elements = opened.elements(opened.tensors["w"], numel - 4, numel)
    assert last_elements.tolist() == [0.0] * 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extreme", ["max", "min"])
def test_finite_values_are_finite_even_if_their_sum_is_not(dtype, extreme):
    """A causal mask, for instance, is filled with the least number of its dtype."""
    values = torch.full((64, 64), getattr(torch.finfo(dtype), extreme), dtype=dtype)
    assert is_finite(values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "bad", [[float("nan")], [float("inf")], [-float("inf")], [float("inf"), -float("inf")]]
)
def test_a_single_nan_or_infinity_is_seen(dtype, bad):
    values = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
    values[: len(bad)] = torch.tensor(bad)
    assert not is_finite(values)
