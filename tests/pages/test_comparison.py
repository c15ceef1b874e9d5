"""The files at the end of a comparison, and what its charts say."""

import json
import shutil
from dataclasses import replace

import pandas as pd
import pytest

from fusion_bench_nufilt.compare.presets import SENSITIVITY
from fusion_bench_nufilt.compare.summary import save_comparison
from fusion_bench_nufilt.pages.comparison import charts_of_comparison
from fusion_bench_nufilt.pages.write import write_results
from tests.compare.helpers import comparison, failed, finished
from tests.pages.charts import encodings, legend, panels, parts, rows_of
from tests.pages.sizes import comparison_of, sensitivity_of

SEEDS = (42, 43)
TEXTS = {
    "table.md",
    "table.tex",
    "per_task.md",
    "per_task.tex",
    "results.csv",
    "results.json",
}
PICTURES = {"accuracy_matrices.png", "stability_plasticity.png", "accuracy_per_step.png"}
charts = charts_of_comparison


def two(**options):
    return comparison(
        {"m": [finished(s, -0.1) for s in SEEDS], "n": [finished(42), failed(43)]}, **options
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a comparison of two methods on two orders."""
    folder = tmp_path_factory.mktemp("saved")
    assert set(save_comparison(two(), folder)) == TEXTS | PICTURES | {"index.html"}
    return folder


def test_tables_pictures_and_the_page_are_made_again_from_the_numbers_alone(saved, tmp_path):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    assert before.keys() == TEXTS | PICTURES | {"index.html"}
    assert all(before[name].startswith(b"\x89PNG") for name in PICTURES)
    shutil.copy(saved / "results.json", tmp_path)
    assert {*write_results(tmp_path), "results.json"} == before.keys()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_csv_holds_each_number_as_a_row_with_what_it_belongs_to(saved):
    table = pd.read_csv(saved / "results.csv")
    acc = table[table["metric"] == "ACC"].set_index(["method", "seed"])["value"]
    assert acc["m", 42] == acc["m", 43] == pytest.approx(0.5)
    assert ("n", 43) not in acc.index  # it failed
    (single,) = table.query("method == 'individual' and task == 'a'")["value"]
    assert single == 0.95


def test_json_holds_every_matrix_and_no_nan(saved):
    text = (saved / "results.json").read_text()
    methods = json.loads(text, parse_constant=lambda word: pytest.fail(word))["methods"]
    assert methods["m"]["ACC"]["mean"] == pytest.approx(0.5)
    assert methods["m"]["runs"]["42"]["accuracy_matrix"] == finished(42, -0.1).matrix.rows()
    assert methods["n"]["runs"]["43"]["error"] == "ValueError: no"


def test_a_picture_without_numbers_is_left_out_and_an_older_one_removed(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    assert "accuracy_per_step.png" not in save_comparison(two(evaluate="diagonal"), tmp_path)
    assert not (tmp_path / "accuracy_per_step.png").exists()
    assert set(save_comparison(comparison({"m": [failed(42)]}), tmp_path)) == TEXTS | {"index.html"}


def test_the_curve_of_a_method_is_its_mean_over_the_seeds_with_a_bar_of_one_deviation():
    chart = charts(comparison({"m": [finished(42), finished(43)]}))["accuracy_per_step"]
    first, _, last = rows_of(chart, name="m")
    assert (last["x"], last["y"], last["low"], last["high"]) == (3, 60.0, 60.0, 60.0)
    assert last["title"] == "m, models merged 3: 60"
    # The two orders begin with other tasks, whose scores are those of tests/compare/helpers.py.
    begins = [100 * run.matrix.values[0, 0] for run in (finished(42), finished(43))]
    assert first["y"] == pytest.approx(sum(begins) / 2)
    deviation = abs(begins[0] - begins[1]) / 2**0.5
    assert first["high"] - first["y"] == pytest.approx(deviation, rel=1e-5)
    levels = {row["words"]: row["level"] for row in rows_of(chart) if "level" in row}
    assert levels == {"individual models, all tasks": 95.0}


def test_one_order_names_the_models_below_the_curve_and_the_best_method_comes_first_in_the_legend():
    chart = charts_of_comparison(
        comparison({"worse": [finished(42, -0.1)], "better": [finished(42)]})
    )["accuracy_per_step"]
    assert [row["x"] for row in rows_of(chart, name="worse")] == finished(42).matrix.steps
    assert legend(chart) == ["better", "worse"]
    assert "title" not in chart.to_dict()  # all methods are shown


def test_what_is_learned_and_kept_stands_beside_every_name_with_the_best_method_first():
    runs = {
        f"m{number}": [finished(42, -0.01 * number), finished(43)] for number in (5, *range(12))
    }
    chart = charts(comparison(runs))["stability_plasticity"]
    acc, _, kept = panels(chart)
    assert (acc, kept) == ("ACC %", "BWT %")
    assert [row["name"] for row in rows_of(chart, panel=acc)] == [f"m{n}" for n in range(12)]
    texts = [rows_of(chart, panel=panel, name="m10")[0]["text"] for panel in panels(chart)]
    assert texts == ["55.0 ± 7.1", "60.0 ± 0.0", "-7.5 ± 10.6"]
    (row,) = rows_of(chart, panel=kept, name="m10")
    deviation = 15 / 2**0.5
    assert (row["low"], row["high"]) == pytest.approx((-7.5 - deviation, -7.5 + deviation))
    one = charts(comparison({"m": [finished(42)]}))["stability_plasticity"]
    assert not {"low", "high"} & {*rows_of(one)[0]}  # one seed has no deviation


def test_matrices_of_the_first_seed_stand_side_by_side():
    chart = charts_of_comparison(two())["accuracy_matrices"]
    first, second = panels(chart)
    assert first.startswith("m: ACC 50.0")
    assert second.startswith("n: ACC 60.0")
    values = []
    for row in finished(42, -0.1).matrix.rows():
        values += [100 * value for value in row if value is not None]
    assert [row["value"] for row in rows_of(chart, panel=first)] == pytest.approx(values)


@pytest.mark.slow
def test_the_sensitivity_ends_in_a_curve_for_each_panel(tmp_path):
    result = sensitivity_of(3)
    acc, bwt = parts(charts(result)["sensitivity"])
    assert panels(acc) == [
        "null_rank = r_p, with r_l = 0, r_v = 0",
        "lora_rank = r_l, with r_p = 0.1667, r_v = 8",
        "task_rank = r_v, with r_p = 0.1667, r_l = 0.0208",
        "max_steps, with r_p = 0.1667, r_l = 0.0833, r_v = 8",
    ]
    for panel, title in zip(SENSITIVITY, panels(acc), strict=True):
        drawn = [row["x"] for row in rows_of(acc, panel=title) if "y" in row]
        assert drawn == [str(value) for value in panel["values"]]
    # The panels of a row have one scale.
    scales = [encodings(panel, "y")[0]["scale"]["domain"] for panel in bwt["concat"]]
    assert scales == [scales[0]] * len(SENSITIVITY)
    result = replace(result, methods=dict(list(result.methods.items())[:3]))  # the others failed
    assert "sensitivity.png" in save_comparison(result, tmp_path)


def test_a_metric_that_was_not_scored_has_no_panels():
    chart = charts(comparison_of(3, 3, evaluate="last"))["stability_plasticity"]
    assert panels(chart) == ["ACC %"]
    (acc,) = parts(charts(sensitivity_of(3, "last"))["sensitivity"])
    assert len(panels(acc)) == 4


def test_a_bar_ends_where_scores_do_and_is_explained():
    runs = {"m": [finished(42, -0.55), finished(43, 0.35)]}
    chart = charts(comparison(runs))["accuracy_per_step"]
    bars = [(row["low"], row["high"]) for row in rows_of(chart, name="m")]
    assert any(low == 0 for low, _ in bars) or any(high == 100 for _, high in bars)
    assert all(0 <= low <= high <= 100 for low, high in bars)
    assert encodings(chart, "y")[0]["title"].endswith("± one std")
    dots = charts(comparison(runs))["stability_plasticity"]
    assert encodings(dots, "x")[0]["title"] == "mean ± one standard deviation"
    for row in rows_of(dots, panel="ACC %"):
        assert 0 <= row["low"] <= row["value"] <= row["high"] <= 100
    one = charts(comparison({"m": [finished(42)]}))
    assert not encodings(one["accuracy_per_step"], "y")[0]["title"].endswith("std")


def test_the_curve_of_a_method_that_lacks_scores_says_of_how_many_tasks_it_is():
    lacking = {"a": 0.9, "b": float("nan"), "c": 0.3}
    methods = {"whole": [finished(42)], "lacking": [finished(42, scores=lacking)]}
    chart = charts_of_comparison(comparison(methods))["accuracy_per_step"]
    names = {row["name"] for row in rows_of(chart) if "name" in row}
    assert names == {"whole", "lacking (2 of 3 tasks)"}
