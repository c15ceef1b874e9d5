"""Pages hold what their folder holds, need nothing else, and never stand in the way of a run."""

import html
import json
import logging
import re
import subprocess
import sys
from base64 import b64encode
from hashlib import sha256
from unittest.mock import patch

import pandas as pd
import pytest

from fusion_bench_nufilt.compare.summary import save_comparison
from fusion_bench_nufilt.pages.charts import heat_maps
from fusion_bench_nufilt.pages.metrics import shown_number
from fusion_bench_nufilt.pages.page import templates
from fusion_bench_nufilt.pages.theme import cells
from fusion_bench_nufilt.pages.write import try_write_report, write_results
from tests.pages.helpers import FOLDERS, LAYERS, TASKS, merge_folder, run_folder
from tests.pages.sizes import comparison_of


def page_of(folder):
    assert "index.html" in write_results(folder)
    return folder / "index.html"


def part(name, *arguments):
    """A part of a page, made alone."""
    return str(getattr(templates().get_template("parts.html").module, name)(*arguments))


def table(header, rows):
    return part("numbers", pd.DataFrame(rows, columns=header, dtype=object))


def body(page):
    """The page without the scripts that come with it."""
    return page.read_text().partition("</main>")[0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "run",
            [
                "NUFILT: 3 models merged",
                "ACC 70.0",
                "encoder.layers.1.mlp.fc1",
                "2.13.0",
                "null_rank",
                "backward transfer, the mean change",
            ],
        ),
        (
            "comparison",
            [
                "some_pool: 2 methods",
                "NUFILT",
                "sum",
                "pretrained",
                "What is learned, and what is kept of it",
                "backward transfer, the mean change",
            ],
        ),
        (
            "analysis",
            [
                "some_pool: 3 task vectors and 2 methods",
                "the mean score over all tasks after the last step",
                "matched pairs have a mean affinity",
                "rho stability",
            ],
        ),
        (
            "merge",
            [
                "NUFILT: 3 models merged",
                "4 layers, 75.0% of all",
                "layers.*.mlp.fc2 (2)",
                "&lt;i&gt;twice",
            ],
        ),
    ],
)
def test_a_page_has_the_numbers_of_its_folder_loads_nothing_from_elsewhere_and_weighs_a_megabyte(
    tmp_path, kind, words
):
    page = page_of(FOLDERS[kind](tmp_path / kind))
    for word in words:
        assert word in body(page)
    assert len(re.findall('class="chart"', body(page))) >= 2
    assert not re.search(r"""(src|href)=["'](?!data:)""", body(page))
    assert "://" not in body(page)
    assert len(page.read_bytes()) < 1_250_000


def test_a_page_explains_the_metrics_that_it_shows(tmp_path):
    save_comparison(comparison_of(2, 3, evaluate="last"), tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "<b>ACC</b>: the mean score" in page
    assert "<b>BWT</b>" not in page


def test_names_are_words_and_never_markup(tmp_path):
    text = body(page_of(run_folder(tmp_path)))  # one of its tasks would like to run a script
    assert "&lt;/ScRiPt &gt;&lt;svg onload=" in text
    assert "<svg" not in text
    for script in re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL):
        assert not set(script) & set("<>&\u2028\u2029")
        assert json.loads(script)
    rows = cells([[1.0]], ["<"], [">"], "\u2028&")
    chart = part("chart", heat_maps(rows, ["<"], [">"], ("row", "column"), "value"), "<b>")
    assert not set(chart.partition('json">')[2].partition("</script>")[0]) & set("<>&\u2028\u2029")


def test_a_page_runs_its_own_two_scripts_and_no_others(tmp_path):
    text = page_of(run_folder(tmp_path)).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = [
        f"sha256-{b64encode(sha256(script.encode()).digest()).decode()}" for script in scripts
    ]
    assert re.findall(r"'(sha256-[^']*)'", policy) == digests
    assert len(scripts) == 2


def test_missing_numbers_sort_last_and_small_ones_stay_visible():
    text = table(["name", "value"], [["a", None], ["b", 0.00001], ["c", 2], ["d", 0.0126]])
    assert 'data-value="">-</td>' in text
    assert ">1e-05</td>" in text
    assert ">2</td>" in text


def test_pages_and_tables_write_a_small_number_alike():
    assert shown_number(0.0126) == "0.013"
    assert shown_number(0.2) == "0.2"
    assert shown_number(0.0, 2) == "0.00"
    assert shown_number(float("nan")) == "-"


def test_a_column_without_a_value_is_left_out_and_per_cents_have_one_decimal():
    rows = [["a", None, 70.04, 0.126], ["b", float("nan"), None, 1.0]]
    text = table(["name", "empty", "ACC %", "share"], rows)
    assert re.findall(r"<button[^>]*>(.*?)</button>", text) == ["name", "ACC %", "share"]
    assert rows_of(text.partition("<tbody")[2]) == [["a", "70.0", "0.13"], ["b", "-", "1.00"]]


CELL = re.compile(r"<t[dh] [^>]*>(.*?)</t[dh]>")


def rows_of(table):
    return [CELL.findall(row) for row in table.split("</tr>")[:-1]]


@pytest.fixture(scope="module")
def bodies(tmp_path_factory):
    """The page of a folder of each kind, made without pictures."""
    folder = tmp_path_factory.mktemp("pages")
    with patch("fusion_bench_nufilt.pages.write.save_chart"):
        return [body(page_of(make(folder / kind))) for kind, make in FOLDERS.items()]


def test_headers_that_sort_are_buttons_and_every_header_says_what_it_is_of(bodies):
    for text in bodies:
        headers = re.findall(r"<th (.*?)>(.*?)</th>", text)
        assert len(headers) == text.count("<th ")
        for attributes, content in headers:
            assert 'scope="col"' in attributes or 'scope="row"' in attributes
            assert content.startswith("<button") == ('scope="col"' in attributes)


def test_a_header_is_above_its_numbers():
    text = table(["name", "share", "what"], [["a", 0.5, "b"]])
    numbers = [
        re.search('class="number"', header) for header in re.findall("<th scope=.col.*?>", text)
    ]
    assert [number is not None for number in numbers] == [False, True, False]


def test_every_chart_has_a_sentence_for_those_who_do_not_see_it(bodies):
    for text in bodies:
        sentences = re.findall(r'<div class="panels" role="group" aria-label="([^"]*)">', text)
        assert len(sentences) == text.count('class="panels"') > 0
        assert all(sentence.endswith(".") for sentence in sentences)
        assert len(set(sentences)) == len(sentences)


def test_a_note_stands_once_on_a_page(tmp_path):
    save_comparison(comparison_of(2, 3), tmp_path)
    notes = re.findall("<li>(.*?)</li>", body(tmp_path / "index.html"))
    assert len(notes) == len(set(notes)) > 1


def test_one_of_a_kind_has_no_plural(tmp_path):
    save_comparison(comparison_of(1, 1, seeds=(42,)), tmp_path)
    text = body(tmp_path / "index.html") + (tmp_path / "table.md").read_text()
    assert "some_pool: 1 method<" in text
    assert not re.findall(r"\b1 \w+s\b", text)


def test_one_task_has_a_picture_of_its_scores_and_none_of_what_is_forgotten(tmp_path):
    files = save_comparison(comparison_of(2, 1), tmp_path)
    assert "stability_plasticity.png" in files
    assert "accuracy_per_step.png" not in files
    text = body(tmp_path / "index.html")
    assert "<h2>Mean score after the last step</h2>" in text
    assert "kept of it" not in text


def test_the_page_of_a_merge_has_the_strongest_layers_first_over_all_its_steps(tmp_path):
    tables = re.findall(r"<tbody[^>]*>(.*?)</tbody>", body(page_of(merge_folder(tmp_path))))
    steps, layers, coverage = map(rows_of, tables)
    tasks = [(row[0], html.unescape(row[1])) for row in steps]
    assert tasks == [("2", "letters"), ("3", TASKS[2])]
    assert [float(row[2]) for row in steps] == pytest.approx([30**0.5, 160**0.5], abs=1e-3)
    norms = {LAYERS[2]: 153**0.5, LAYERS[0]: 17**0.5, LAYERS[3]: 4, LAYERS[1]: 2}
    assert [row[0] for row in layers] == list(norms)
    assert [float(row[2]) for row in layers] == pytest.approx(list(norms.values()), abs=1e-3)
    assert coverage == [["merged", "4", "75.0"], ["kept", "6", "25.0"]]


def test_the_page_of_a_merge_that_began_at_another_step_names_the_task_of_each(tmp_path):
    merge_folder(tmp_path)
    content = json.loads((tmp_path / "nufilt.json").read_text())
    assert "the steps before are on the page" in body(page_of(tmp_path))
    content |= {"tasks": content["tasks"][1:], "step": 12}
    for reports in content["layers"].values():
        for report in reports:
            report["step"] += 9
    (tmp_path / "nufilt.json").write_text(json.dumps(content))
    text = body(page_of(tmp_path))
    steps = re.search(r"<tbody[^>]*>(.*?)</tbody>", text)[1]
    tasks = [(step, html.unescape(task)) for step, task, *_ in rows_of(steps)]
    assert tasks == [("11", "letters"), ("12", TASKS[2])]
    assert "the steps before are on the page" not in text


def test_a_step_of_a_run_names_the_folder_that_has_a_page(tmp_path):
    step = merge_folder(tmp_path / "checkpoints" / "merged_model_2")
    content = json.loads((step / "nufilt.json").read_text())
    del content["layers"]
    (step / "nufilt.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"name the log directory .* in which checkpoints/ is"):
        write_results(step)


def test_a_run_without_scores_says_how_it_gets_a_page(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a run without scores, which has no page: .* task pool"):
        write_results(tmp_path)


def test_a_folder_of_no_kind_is_named(tmp_path):
    with pytest.raises(ValueError, match="is the folder of no run, comparison, analysis or merge"):
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
        assert try_write_report(tmp_path) == []
    assert "there are no tables, pictures and page" in caplog.text
    assert try_write_report(run_folder(tmp_path)) == [
        "accuracy_matrix.csv",
        "accuracy_matrix.png",
        "index.html",
    ]


def test_making_results_needs_neither_torch_nor_fusion_bench():
    code = (
        "import fusion_bench_nufilt.pages.write, sys; assert not {'torch', 'fusion_bench'} & "
        "set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
