"""The last line of the demo: adapters of its models become one adapter."""

import runpy
import sys

import pytest

from tests.conftest import REPO


@pytest.mark.slow
def test_adapters_of_the_demo_are_one_adapter(demo, tmp_path, monkeypatch, capsys):
    script = str(REPO / "tools" / "merge_demo_adapters.py")
    out = tmp_path / "adapter"
    monkeypatch.setattr(sys, "argv", [script, "--rank", "2", "--out", str(out)])
    runpy.run_path(script, run_name="__main__")
    line = capsys.readouterr().out
    assert line.startswith("8 adapters of rank 2 in one of rank 16, by best: ")
    assert (out / "adapter_model.safetensors").is_file()
