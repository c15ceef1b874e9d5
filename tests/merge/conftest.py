"""What most tests of folders begin with."""

import shutil

import pytest

from tests.merge.helpers import save_stream
from tests.tiny_models import llama


@pytest.fixture(scope="session")
def saved_stream(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    save_stream(folder, llama())
    return folder


@pytest.fixture
def stream(saved_stream, tmp_path):
    """A folder with a tiny Llama and three tasks."""
    shutil.copytree(saved_stream, tmp_path, dirs_exist_ok=True)
    return tmp_path
