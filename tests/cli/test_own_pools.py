"""A model pool of one's own, as the page has it, is found by a comparison and an analysis."""

import pytest

from tests.cli.helpers import nufilt
from tests.conftest import REPO
from tests.docs import save_clips_and_images, write_files

PAGE = REPO / "docs" / "fusionbench.md"


@pytest.fixture
def here(tmp_path, demo, monkeypatch):
    """A working folder with the files on the page, and the models and images that they name."""
    write_files(tmp_path, PAGE)
    save_clips_and_images(tmp_path, demo)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_pool_that_is_not_found_is_one_short_line(here):
    not_found = "there is no modelpool 'mine'; one of your own is found in the folder of "
    for command in ("compare", "analyze"):
        for words, line in (
            (["mine"], f"{not_found}--config-dir, as modelpool/mine.yaml"),
            (
                ["min", "--config-dir", "my_config"],
                "there is no modelpool 'min'; did you mean 'mine'?",
            ),
            (["mine", "--config-dir", "other"], "--config-dir: there is no folder 'other'"),
        ):
            code, text = nufilt(command, "--methods", "nufilt", "--modelpool", *words)
            assert (code, text.strip()) == (1, f"error: {line}")
