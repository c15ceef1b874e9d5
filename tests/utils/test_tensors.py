"""safetensors files that are read tensor by tensor."""

import json

import psutil
import pytest

from fusion_bench_nufilt.utils.tensors import TensorFile


def test_a_file_larger_than_memory_is_opened_without_reserving_it(tmp_path):
    """A sparse file: its size is only said."""
    size = 2 * (psutil.virtual_memory().total + psutil.swap_memory().total)
    header = json.dumps(
        {"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size // 2 * 2]}}
    ).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(8 + len(header) + size // 2 * 2)
        except OSError:
            pytest.skip("no sparse files on this disk")
    opened = TensorFile(tmp_path / "model.safetensors")
    assert opened.elements(opened.tensors["w"], size // 2 - 4, size // 2).tolist() == [0.0] * 4
