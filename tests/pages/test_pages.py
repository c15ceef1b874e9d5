"""Pages hold what their folder holds, need nothing else, and never stand in the way of a run."""

import html
import json
import logging
import re
import subprocess
import sys
from html.parser import HTMLParser

import pandas as pd
import pytest

from fusion_bench_nufilt.pages.comparison import comparison_outputs
from fusion_bench_nufilt.pages.merge import merge_outputs
from fusion_bench_nufilt.pages.metrics import shown_number
from fusion_bench_nufilt.pages.tables import number_table
from fusion_bench_nufilt.pages.write import try_write_report, write_results
from tests.pages.helpers import LAYERS, TASKS, merge_folder, run_folder
from tests.pages.sizes import comparison_of


def page_of(content):
    """The page of a comparison, made without pictures as files."""
    return comparison_outputs(content, None).page


def table(header, rows):
    frame = pd.DataFrame(rows, columns=header, dtype=object)
    return number_table(frame).as_html()


def rows_of(table):
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("</tr>")[1:-1]]


WORDS = {
    "run": [
        "NUFILT: 3 models merged",
        "ACC 70.0",
        "scored on all test data",
        "encoder.layers.1.mlp.fc1",
        "2.13.0",
        "null_rank",
        "backward transfer, the mean change",
    ],
    "comparison": [
        "some_pool: 2 methods",
        "NUFILT",
        "sum",
        "pretrained",
        "What is learned, and what is kept of it",
        "backward transfer, the mean change",
    ],
    "analysis": [
        "some_pool: 3 task vectors and 2 methods",
        "the mean score over all tasks after the last step",
        "matched pairs have a mean affinity",
        "rho stability",
    ],
    "merge": [
        "NUFILT: 3 models merged",
        "4 layers, 75.0% of all",
        "layers.*.mlp.fc2 (2)",
        "&lt;i&gt;twice",
    ],
}


class Elements(HTMLParser):
    """The tags of a page, with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_a_page_has_the_numbers_and_pictures_of_its_folder_and_is_small(folders):
    assert folders.keys() == WORDS.keys()
    for kind, folder in folders.items():
        page = (folder / "index.html").read_text()
        for word in WORDS[kind]:
            assert word in page, (kind, word)
        assert page.count("<svg ") == page.count('class="chart"') >= 2
        assert len(page.encode()) < 200_000


def test_a_page_runs_nothing_and_loads_nothing_whatever_its_names(folders):
    """One of the tasks would like to run a script."""
    for folder in folders.values():
        page = (folder / "index.html").read_text()
        assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page
        for tag, attributes in Elements(page).found:
            assert tag not in ("script", "object", "iframe", "embed", "foreignobject", "image")
            assert not any(name.startswith("on") for name in attributes), attributes
            for name in ("src", "href", "xlink:href"):
                assert attributes.get(name, "data:,") == "data:,"
    run = (folders["run"] / "index.html").read_text()
    assert "&lt;/ScRiPt &gt;&lt;svg onload=" in run


def test_a_page_explains_the_metrics_that_it_shows():
    page = page_of(comparison_of(2, 3, evaluate="last"))
    assert "<b>ACC</b>: the mean score" in page
    assert "<b>BWT</b>" not in page


def test_missing_and_small_numbers_are_seen():
    rows = rows_of(table(["name", "value"], [["a", None], ["b", 0.00001], ["c", 2], ["d", 0.126]]))
    assert [value for _, value in rows] == ["-", "1e-05", "2", "0.13"]


def test_pages_and_tables_write_a_small_number_alike():
    assert shown_number(0.0126) == "0.013"
    assert shown_number(0.2) == "0.2"
    assert shown_number(0.0, 2) == "0.00"
    assert shown_number(float("nan")) == "-"


def test_a_column_without_a_value_is_left_out_and_per_cents_have_one_decimal():
    rows = [["a", None, 70.04, 0.126], ["b", float("nan"), None, 1.0]]
    text = table(["name", "empty", "ACC %", "share"], rows)
    assert re.findall(r"<th[^>]*>(.*?)</th>", text) == ["name", "ACC %", "share"]
    assert rows_of(text) == [["a", "70.0", "0.13"], ["b", "-", "1.00"]]


def test_every_chart_has_a_sentence_of_its_own_for_those_who_do_not_see_it(folders):
    for folder in folders.values():
        page = (folder / "index.html").read_text()
        sentences = re.findall(r'<div class="chart" role="group" aria-label="([^"]*)">', page)
        assert len(sentences) == page.count('class="chart"')
        assert all(sentence.endswith(".") for sentence in sentences)
        assert len(set(sentences)) == len(sentences)


def test_a_note_stands_once_on_a_page():
    notes = re.findall("<li>(.*?)</li>", page_of(comparison_of(2, 3)))
    assert len(notes) == len(set(notes)) > 1


def test_one_method_and_one_task_have_no_plural_and_no_picture_of_what_is_forgotten():
    outputs = comparison_outputs(comparison_of(1, 1, seeds=(42,)), None)
    text = re.sub("<style>.*?</style>|<svg.*?</svg>", "", outputs.page, flags=re.DOTALL)
    text += outputs.texts["table.md"]
    assert "some_pool: 1 method<" in text
    assert not re.findall(r"\b1 \w+s\b", text)
    assert "<h2>Mean score after the last step</h2>" in text
    assert "kept of it" not in text
    assert outputs.pictures["stability_plasticity"] is not None
    assert outputs.pictures["accuracy_per_step"] is None


def test_the_page_of_a_merge_has_the_strongest_layers_first_over_all_its_steps(folders):
    page = (folders["merge"] / "index.html").read_text()
    steps, layers, coverage = map(rows_of, re.findall("<table.*?</table>", page, re.DOTALL))
    assert [html.unescape(row[0]) for row in steps] == ["2 + letters", f"3 + {TASKS[2]}"]
    assert [float(row[1]) for row in steps] == pytest.approx([30**0.5, 160**0.5], abs=1e-3)
    norms = {LAYERS[2]: 153**0.5, LAYERS[0]: 17**0.5, LAYERS[3]: 4, LAYERS[1]: 2}
    assert [row[0] for row in layers] == list(norms)
    assert [float(row[2]) for row in layers] == pytest.approx(list(norms.values()), abs=1e-3)
    assert coverage == [["merged", "4", "75.0"], ["kept", "6", "25.0"]]


def test_the_page_of_a_merge_that_began_at_another_step_names_the_task_of_each(folders):
    content = json.loads((folders["merge"] / "nufilt.json").read_text())
    assert "the steps before are on the page" in merge_outputs(content, None).page
    content |= {"tasks": content["tasks"][1:], "step": 12}
    for reports in content["layers"].values():
        for report in reports:
            report["step"] += 9
    page = merge_outputs(content, None).page
    steps = rows_of(re.search("<table.*?</table>", page, re.DOTALL)[0])
    assert [html.unescape(row[0]) for row in steps] == ["11 + letters", f"12 + {TASKS[2]}"]
    assert "the steps before are on the page" not in page


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
