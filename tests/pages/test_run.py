"""The files that are made of a run's scores, and what its charts say."""

from itertools import product

import pandas as pd
import pytest

from fusion_bench_nufilt.pages.layers import layer_charts
from fusion_bench_nufilt.pages.results import layer_rows
from fusion_bench_nufilt.pages.run import RunContent, run_outputs
from fusion_bench_nufilt.pages.write import read_layers, write_results
from tests.pages.charts import legend, rows_of
from tests.pages.helpers import PARTS, TASKS, run_folder


def test_the_csv_holds_fractions_and_nothing_where_nothing_was_measured(folders):
    folder = folders["run"]
    text = (folder / "accuracy_matrix.csv").read_bytes()
    assert b"\r" not in text
    table = pd.read_csv(folder / "accuracy_matrix.csv")
    assert list(table.columns) == ["step", "merged_task", *TASKS]
    assert text.decode().splitlines()[2] == "2,letters,0.8,0.7,"
    text = (folder / "index.html").read_text()  # its steps say what was forgotten
    row = text[text.index(">1 + digits</td>") :].partition("</tr>")[0]
    for number in ("90.0", "75.0", "-15.0", "0.1"):
        assert row.count(f">{number}</td>") == 1


def test_a_task_may_be_called_like_another_column_of_the_csv():
    scores = [[0.9, None, None], [0.8, 0.7, None], [0.7, 0.6, 0.5]]
    names = ["step", "merged_task", "task"]
    run = RunContent("NUFILT", {}, {}, {}, [], names, scores, "all test data")
    header, *rows = run_outputs(run, None).texts["accuracy_matrix.csv"].splitlines()
    assert header == "step,merged_task,step,merged_task,task"
    assert rows == ["1,step,0.9,,", "2,merged_task,0.8,0.7,", "3,task,0.7,0.6,0.5"]


def test_a_task_may_have_a_name_that_reads_as_a_missing_number_or_as_a_number(tmp_path):
    file = tmp_path / "layers.csv"
    file.write_text("step,task,layer,overlap\n1,NA,fc,0.5\n2,null,fc,\n3,1,fc,0.25\n")
    rows = read_layers(file)
    assert list(rows["task"]) == ["NA", "null", "1"]
    assert list(rows["overlap"].isna()) == [False, True, False]


@pytest.mark.filterwarnings("error")
def test_the_numbers_of_a_table_are_read_to_the_last_bit_and_steps_stay_whole(tmp_path):
    numbers = [1 / 3, 8.988465674311579e-308, 0.1 + 0.2, -7e22]
    table = pd.DataFrame({"step": [1, 2, 3, 10], "task": "a", "layer": "fc", "overlap": numbers})
    table.to_csv(tmp_path / "layers.csv", index=False)
    rows = read_layers(tmp_path / "layers.csv")
    assert rows.to_csv(index=False) == table.to_csv(index=False)
    assert list(rows["overlap"]) == numbers


def test_layers_are_drawn_by_block_over_the_steps_and_by_step_over_each_kind():
    layers = [f"layers.{block}.{part}" for block, part in product((0, 1), PARTS)]
    rows = []
    for step in (1, 2):
        rows += [(step, layer, 10 * step + place) for place, layer in enumerate(layers)]
    table = pd.DataFrame(rows, columns=["step", "layer", "overlap"])
    charts = layer_charts(layer_rows(table))
    found = [(row["layer"], row["y"]) for row in rows_of(charts["by_layer"])]
    assert found == [(layer, 15 + place) for place, layer in enumerate(layers)]
    found = [(row["name"], row["x"], row["y"]) for row in rows_of(charts["by_step"])]
    assert found == [("attention", 1, 11), ("MLP", 1, 12), ("attention", 2, 21), ("MLP", 2, 22)]
    # The kinds have the same colours in both.
    assert legend(charts["by_layer"]) == legend(charts["by_step"])
    assert layer_charts(layer_rows(table[table["step"] == 1])).keys() == {"by_layer"}
    assert layer_charts(layer_rows(table[["step", "layer"]])) == {}


def test_damaged_layers_are_named(tmp_path):
    (run_folder(tmp_path) / "layers.csv").write_text("step,layer,overlap\n1,a\n2,b,c,d\n")
    with pytest.raises(ValueError, match=r"layers\.csv"):
        write_results(tmp_path)
