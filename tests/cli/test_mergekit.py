"""Files of mergekit: `nufilt mergekit` runs them, and nothing else does."""

import sys

import pytest
import yaml

from tests.cli.helpers import nufilt

FILE = {"merge_method": "best", "base_model": "base", "models": [{"model": "task1"}]}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mergekit.yaml").write_text(yaml.safe_dump(FILE))
    return "mergekit.yaml"


def test_nufilt_merge_says_what_runs_a_file_of_mergekit(file):
    code, text = nufilt("merge", file, "--out", "out")
    assert code == 1, text
    assert "is a file of mergekit, run by: nufilt mergekit mergekit.yaml OUT" in text


@pytest.fixture
def without_mergekit(monkeypatch):
    """Every import of mergekit fails, as where it is not installed."""
    for name in {"mergekit", *sys.modules}:
        if name.partition(".")[0] == "mergekit" or name.endswith(".in_mergekit"):
            monkeypatch.setitem(sys.modules, name, None)


def test_without_mergekit_one_is_told_what_to_install(file, without_mergekit):
    code, text = nufilt("mergekit", file, "out")
    assert code == 1, text
    assert "pip install 'fusion-bench-nufilt[mergekit]'" in text
