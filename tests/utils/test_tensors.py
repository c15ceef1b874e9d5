"""safetensors files that are read tensor by tensor."""

import json
import os
import time

import psutil
import pytest
import torch
from safetensors.torch import save_file

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


def test_a_file_that_is_written_over_is_changed_though_its_size_and_time_are_as_before(tmp_path):
    """`cp -p` and `tar` set the time of a file that they write to."""
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(4)}, path)
    before = path.stat()
    opened = TensorFile(path)
    assert not opened.changed()
    deadline = time.monotonic() + 5
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # a clock of some milliseconds
        assert time.monotonic() < deadline
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"1")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    kept = ("st_size", "st_mtime_ns", "st_ino")
    assert [getattr(after, name) for name in kept] == [getattr(before, name) for name in kept]
    assert opened.changed()
