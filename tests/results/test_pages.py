"""Pages hold what their folder holds, need nothing else, and never stand in the way of a run."""

import json
import logging
import re
import subprocess
import sys
from base64 import b64encode
from hashlib import sha256

import pytest

from fusion_bench_nufilt.results.charts import heat_maps
from fusion_bench_nufilt.results.page import Page
from fusion_bench_nufilt.results.write import leave_results, write_results
from tests.results.helpers import FOLDERS, run_folder


def page_of(folder):
    assert "index.html" in write_results(folder)
    return folder / "index.html"


def body(page):
    """The page without the scripts that come with it."""
    return page.read_text().partition("</main>")[0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("run", ["NUFILT: 3 models merged", "ACC 70.0", "encoder.layers.1.mlp.fc1", "2.13.0", "null_rank"]),
        ("comparison", ["some_pool: 2 methods", "NUFILT", "sum", "pretrained", "Stability against plasticity"]),
        ("analysis", ["some_pool: why it merges", "matched pairs have a mean affinity", "Theorem 1", "rho stability"]),
    ],
)
def test_a_page_has_the_numbers_of_its_folder_loads_nothing_from_elsewhere_and_weighs_a_megabyte(tmp_path, kind, words):
    page = page_of(FOLDERS[kind](tmp_path / kind))
    for word in words:
        assert word in body(page)
    assert len(re.findall('class="chart"', body(page))) >= 4
    assert not re.search(r"""(src|href)=["'](?!data:)""", body(page))
    assert "://" not in body(page)
    assert len(page.read_bytes()) < 1_200_000


def test_names_are_words_and_never_markup(tmp_path):
    text = body(page_of(run_folder(tmp_path)))  # one of its tasks would like to run a script
    assert "&lt;/ScRiPt &gt;&lt;svg onload=" in text
    assert "<svg" not in text
    for script in re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL):
        assert not set(script) & set("<>&\u2028\u2029")
        assert json.loads(script)
    page = Page("<b>", "<i>")
    page.chart(heat_maps({"\u2028&": [[1.0]]}, ["<"], [">"], ("row", "column")))
    assert not set(page.parts[0].partition('json">')[2].partition("</script>")[0]) & set("<>&\u2028\u2029")


def test_a_page_runs_its_own_two_scripts_and_no_others(tmp_path):
    text = page_of(run_folder(tmp_path)).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = [f"sha256-{b64encode(sha256(script.encode()).digest()).decode()}" for script in scripts]
    assert re.findall(r"'(sha256-[^']*)'", policy) == digests
    assert len(scripts) == 2


def test_missing_numbers_sort_last_and_small_ones_stay_visible():
    page = Page("title", "subtitle")
    page.table(["name", "value"], [["a", None], ["b", 0.00001], ["c", 2]])
    assert 'data-value="">-</td>' in page.parts[0]
    assert "1.00e-05" in page.parts[0]
    assert ">2</td>" in page.parts[0]


def test_a_folder_of_no_kind_is_named(tmp_path):
    with pytest.raises(ValueError, match="is the folder of no run, comparison or analysis"):
        write_results(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("results.json", "{", "it is no JSON"),
        ("results.json", "[]", "input should be an object"),
        ("results.json", "{}", "field 'settings': field required"),
        ("analysis.json", "{}", "field 'about': field required"),
        ("accuracy_matrix.json", '{"method": "m", "tasks": "a"}', "field 'config': field required"),
    ],
)
def test_a_damaged_file_is_one_line_that_names_file_and_field(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name}' is damaged, {message}") as error:
        write_results(tmp_path)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_can_not_be_made_is_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert leave_results(tmp_path) == []
    assert "there are no tables, pictures and page" in caplog.text
    assert leave_results(run_folder(tmp_path)) == ["accuracy_matrix.csv", "accuracy_matrix.png", "index.html"]


def test_making_results_needs_neither_torch_nor_fusion_bench():
    code = "import fusion_bench_nufilt.results.write, sys; assert not {'torch', 'fusion_bench'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
