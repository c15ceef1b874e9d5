"""A model pool of one's own, as the page has it, is found by a comparison and an analysis."""

import json

import pytest

from tests.cli.helpers import nufilt
from tests.conftest import REPO
from tests.docs import blocks_of, save_clips_and_images, write_files

PAGE = REPO / "docs" / "fusionbench.md"


@pytest.fixture
def here(tmp_path, demo, monkeypatch):
    """A working folder with the files on the page, and the models and images that they name."""
    write_files(tmp_path, PAGE)
    save_clips_and_images(tmp_path, demo)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words_on_the_page(command):
    for block in blocks_of(PAGE):
        for words in block.words("nufilt"):
            if words[0] == command:
                return words
    raise LookupError(command)


@pytest.mark.slow
def test_a_comparison_scores_its_tasks(here):
    quick = ("--methods", "nufilt:max_steps=1", "--evaluate", "last", "--json")
    code, text = nufilt(*words_on_the_page("compare"), *quick)
    assert code == 0, text
    results = json.loads((here / "outputs" / "compare" / "results.json").read_text())
    assert sorted(results["tasks"]) == ["birds", "cars"]


@pytest.mark.slow
def test_an_analysis_measures_its_task_vectors(here):
    code, text = nufilt(*words_on_the_page("analyze"), "--methods", "none", "--samples", "10")
    assert code == 0, text
    assert (here / "outputs" / "analysis" / "index.html").is_file()


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


def test_folders_are_analysed_without_a_configuration():
    for word in ("--config-dir=my_config", "~modelpool.models.digits"):
        code, text = nufilt("analyze", "--base", "base", "--task", "task", word)
        assert code == 1
        assert f"{word.partition('=')[0]} does not go with --base" in text
