"""The files that are made of a run's scores, and what its charts say."""

import pandas as pd
import pytest

from fusion_bench_nufilt.pages.run import layer_charts
from fusion_bench_nufilt.pages.write import write_results
from tests.pages.helpers import TASKS, run_folder


def test_the_csv_holds_fractions_and_nothing_where_nothing_was_measured(tmp_path):
    write_results(run_folder(tmp_path))
    text = (tmp_path / "accuracy_matrix.csv").read_bytes()
    assert b"\r" not in text
    table = pd.read_csv(tmp_path / "accuracy_matrix.csv")
    assert list(table.columns) == ["step", "merged_task", *TASKS]
    assert text.decode().splitlines()[2] == "2,letters,0.8,0.7,"
    text = (tmp_path / "index.html").read_text()  # its steps say what was forgotten
    row = text[text.index("<td>digits</td>") :].partition("</tr>")[0]
    assert [row.count(f">{number}</td>") for number in ("90.0", "75.0", "-15.0", "0.1")] == [
        1,
        1,
        1,
        1,
    ]


def test_the_means_are_those_of_each_kind_of_layer(monkeypatch):
    shown = []
    monkeypatch.setattr(
        "fusion_bench_nufilt.pages.run.lines", lambda *arguments: shown.append(arguments)
    )
    layers = [
        f"layers.{block}.{part}" for block in (0, 1) for part in ("self_attn.q_proj", "mlp.fc1")
    ]
    rows = [
        (step, layer, 10 * step + place) for step in (1, 2) for place, layer in enumerate(layers)
    ]
    layer_charts(pd.DataFrame(rows, columns=["step", "layer", "overlap"]))
    ((curves, steps, _),) = shown
    assert steps == [1, 2]
    assert curves == {"overlap of new and old subspaces": {"attention": [11, 21], "MLP": [12, 22]}}
    assert list(curves.popitem()[1]) == [
        "attention",
        "MLP",
    ]  # as in the explorer, so that the colours are the same


def test_damaged_layers_are_named(tmp_path):
    (run_folder(tmp_path) / "layers.csv").write_text("step,layer,overlap\n1,a\n2,b,c,d\n")
    with pytest.raises(ValueError, match=r"layers\.csv"):
        write_results(tmp_path)
