"""What most tests of folders begin with."""

import pytest

from tests.merge.helpers import save_stream
from tests.tiny_models import llama


@pytest.fixture
def stream(tmp_path):
    """A folder with a tiny Llama and three tasks."""
    save_stream(tmp_path, llama())
    return tmp_path
