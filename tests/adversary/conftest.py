"""Good inputs to spoil, and the tally of a run."""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from tests.merge.helpers import merge, save_stream, tensors
from tests.models.test_adapters import save_adapter
from tests.tiny_models import llama

GOOD = ("cases", "clean refusals", "merged as if nothing were wrong", "kills", "kills resumed")
BAD = (
    "tracebacks",
    "hangs",
    "wrong results",
    "inputs or foreign files changed",
    "work folders damaged",
)
COUNTS: Counter[str] = Counter()


def expect(condition: object, otherwise: str, message: object = "") -> None:
    """Fail, and count what went wrong, unless the condition holds."""
    COUNTS[otherwise] += not condition
    assert condition, f"{otherwise}: {message}"


def pytest_addoption(parser):
    parser.addoption("--tally", action="store_true", help="end with what became of the bad inputs")


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("tally", False):
        terminalreporter.section("bad inputs")
        terminalreporter.write_line(
            "\n".join(f"{name:32} {COUNTS[name]:6}" for name in (*GOOD, *BAD))
        )
        from tests.adversary import entry_points

        terminalreporter.write_line(entry_points.report())


@pytest.fixture(scope="session")
def good(tmp_path_factory) -> Path:
    """A folder with good inputs: ``base``, ``task1``, ``task2``, the adapter ``lora``, and ``one``,
    a merged model.
    """
    folder = tmp_path_factory.mktemp("adversary") / "good"
    save_stream(folder, llama(), tasks=2)
    save_adapter(folder, LlamaForCausalLM.from_pretrained(folder / "base"))
    (folder / "adapter").rename(folder / "lora")
    shutil.rmtree(folder / "task9")
    merge(folder, ["task1"], "one")
    return folder


@pytest.fixture
def inputs(good, tmp_path) -> Path:
    """A copy of the good inputs to write to."""
    return shutil.copytree(good, tmp_path / "inputs")


@pytest.fixture(scope="session")
def expected(good):
    """The tensors that the good inputs are merged into."""
    return tensors(merge(good, ["task1", "task2"], "../expected"))


def contents(folder: Path) -> dict[str, object]:
    """All there is in a folder, links unfollowed."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        content = (
            os.readlink(path)
            if path.is_symlink()
            else path.read_bytes()
            if path.is_file()
            else None
        )
        found[str(path.relative_to(folder))] = content
    return found
