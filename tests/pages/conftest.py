"""What pages, charts and tables draw, made once for all tests that only read it."""

import pytest

from fusion_bench_nufilt.pages.write import write_results
from tests.pages.helpers import FOLDERS


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A folder of each kind with its tables, pictures and page."""
    made = {}
    for kind, make in FOLDERS.items():
        made[kind] = make(tmp_path_factory.mktemp(kind))
        write_results(made[kind])
    return made
