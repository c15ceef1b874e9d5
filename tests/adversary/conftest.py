"""Good inputs to spoil."""

import os
import shutil
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from tests.merge.helpers import merge, save_stream, tensors
from tests.models.test_adapters import save_adapter
from tests.tiny_models import llama


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
        content: object = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        found[str(path.relative_to(folder))] = content
    return found
