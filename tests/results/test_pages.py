"""Pages hold what their folder holds, need nothing else, and never stand in the way of a run."""

import json
import logging
import re

import pytest

from fusion_bench_nufilt.results.page import Page
from fusion_bench_nufilt.results.write import leave_page, write_page
from tests.results.helpers import FOLDERS, run_folder


def body(page):
    """The page without the scripts that come with it."""
    return page.read_text().partition("</main>")[0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("run", ["NUFILT: 3 models merged", "ACC 70.0 %", "encoder.layers.1.mlp.fc1", "2.13.0", "null_rank"]),
        ("comparison", ["some_pool: 2 methods", "NUFILT", "sum", "pretrained", "Stability against plasticity"]),
        ("analysis", ["some_pool: why it merges", "matched pairs have a mean affinity", "Theorem 1", "rho stability"]),
    ],
)
def test_a_page_has_the_numbers_of_its_folder(tmp_path, kind, words):
    page = write_page(FOLDERS[kind](tmp_path / kind))
    assert page.name == "index.html"
    for word in words:
        assert word in body(page)
    assert len(re.findall('class="chart"', body(page))) >= 4


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_page_loads_nothing_from_elsewhere(tmp_path, kind):
    text = write_page(FOLDERS[kind](tmp_path / kind)).read_text()
    own = body(tmp_path / kind / "index.html") + text[text.rindex("<script>") :]
    assert not re.search(r"""(src|href)=["'](?!data:)""", own)
    assert "://" not in own
    assert len(text) < 1_500_000


def test_names_are_words_and_never_markup(tmp_path):
    text = body(write_page(run_folder(tmp_path)))  # one of its tasks is called </script>
    assert "&lt;/script&gt;" in text
    for script in re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL):
        assert not set(script) & set("<>&")
        assert json.loads(script)


def test_missing_numbers_sort_last_and_small_ones_stay_visible():
    page = Page("title", "subtitle")
    page.table(["name", "value"], [["a", None], ["b", 0.00001], ["c", 2]])
    assert 'data-value="">-</td>' in page.parts[0]
    assert "1.00e-05" in page.parts[0]
    assert ">2</td>" in page.parts[0]


def test_a_folder_of_no_kind_is_named(tmp_path):
    with pytest.raises(ValueError, match="is the folder of no run, comparison or analysis"):
        write_page(tmp_path)


@pytest.mark.parametrize("content", ["{", "{}", "[]"])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match=r"results\.json' is damaged or of another version"):
        write_page(tmp_path)
    assert not (tmp_path / "index.html").exists()


def test_a_page_that_can_not_be_made_is_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert leave_page(tmp_path) == []
    assert "there is no index.html" in caplog.text
    run_folder(tmp_path)
    assert leave_page(tmp_path) == ["index.html"]
