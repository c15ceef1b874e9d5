"""The files at the end of a comparison."""

import csv
import json
from dataclasses import replace

import pytest

from fusion_bench_nufilt.compare.presets import SENSITIVITY, panel_specs
from fusion_bench_nufilt.compare.summary import MethodResult
from fusion_bench_nufilt.results.comparison_files import save_report
from fusion_bench_nufilt.results.comparison_pictures import sensitivity
from tests.compare.helpers import CONFIG, comparison, failed, finished

SEEDS = (42, 43)
B32 = "clip-vit-base-patch32_TA8"
TEXTS = {"table.md", "table.tex", "table.csv", "per_task.md", "per_task.tex", "per_task.csv", "results.json"}


def two(**options):
    return comparison({"m": [finished(s, -0.1) for s in SEEDS], "n": [finished(42), failed(43)]}, **options)


def rows(file):
    return {row["method"]: row for row in csv.DictReader(file.read_text().splitlines())}


def test_tables_pictures_and_numbers(tmp_path):
    files = save_report(two(), tmp_path)
    pictures = {"accuracy_matrices.png", "stability_plasticity.png", "accuracy_per_step.png"}
    assert set(files) == TEXTS | pictures | {"index.html"} == {path.name for path in tmp_path.iterdir()}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_csv_holds_fractions_and_nothing_where_there_is_none(tmp_path):
    save_report(two(modelpool=B32), tmp_path)
    table = rows(tmp_path / "table.csv")
    assert float(table["m"]["ACC_mean"]) == pytest.approx(0.5)
    assert float(table["m"]["ACC_std"]) == pytest.approx(0)
    assert (table["n"]["ACC_std"], table["n"]["finished"], table["n"]["failed"]) == ("", "42", "ValueError: no")
    assert float(table["individual"]["paper_ACC"]) == pytest.approx(0.904)
    assert float(rows(tmp_path / "per_task.csv")["individual"]["a_mean"]) == 0.95


def test_a_number_that_is_printed_for_the_same_is_on_the_page_and_in_the_csv_with_its_note(tmp_path):
    method = {"task_arithmetic": [finished(42)]}
    save_report(comparison(method, modelpool="flan-t5-base_glue", overrides=["method.shuffle_order=false"]), tmp_path)
    row = rows(tmp_path / "table.csv")["task_arithmetic"]
    assert float(row["paper_ACC"]) == pytest.approx(0.776)
    assert row["paper_note"].startswith("not comparable")
    page = (tmp_path / "index.html").read_text()
    assert "77.6" in page
    assert "task_arithmetic: not comparable" in page


def test_json_holds_every_matrix_and_no_nan(tmp_path):
    save_report(two(), tmp_path)
    text = (tmp_path / "results.json").read_text()
    results = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert results["seeds"] == [42, 43]
    assert results["methods"]["m"]["ACC"]["mean"] == pytest.approx(0.5)
    assert results["methods"]["m"]["runs"]["42"]["accuracy_matrix"] == finished(42, -0.1).matrix.rows()
    assert results["methods"]["n"]["runs"]["43"]["error"] == "ValueError: no"


def test_a_picture_without_numbers_is_left_out_and_an_older_one_removed(tmp_path):
    save_report(two(), tmp_path)
    assert "accuracy_per_step.png" not in save_report(two(evaluate="diagonal"), tmp_path)
    assert not (tmp_path / "accuracy_per_step.png").exists()
    assert set(save_report(comparison({"m": [failed(42)]}), tmp_path)) == TEXTS | {"index.html"}


def test_the_ablation_ends_in_bars(tmp_path):
    assert "ablation.png" in save_report(two(preset="ablation", modelpool=B32), tmp_path)


def test_the_sensitivity_ends_in_a_curve_for_each_panel(tmp_path):
    methods = []
    for panel in SENSITIVITY:
        for spec in panel_specs(panel, width=768):
            config = {**CONFIG, **{key: int(value) for key, value in (each.split("=") for each in spec.settings)}}
            config = {"max_steps": 50, "lora_rank": 64, "null_rank": 128, "task_rank": 8} | config
            methods.append(MethodResult(spec, [finished(seed, config=config) for seed in SEEDS]))
    result = replace(two(preset="sensitivity"), methods=methods)
    assert "sensitivity.png" in save_report(result, tmp_path)
    panels = sensitivity(result).axes
    assert [[tick.get_text() for tick in axes.get_xticklabels()] for axes in panels[len(SENSITIVITY) :]] == [
        [str(value) for value in panel.values] for panel in SENSITIVITY
    ]
    assert [axes.get_title() for axes in panels[:3]] == [
        "$r_l$ = 0, $r_v$ = 0", "$r_p$ = 128, $r_v$ = 8", "$r_p$ = 128, $r_l$ = 16",
    ]  # fmt: skip
    save_report(replace(result, methods=methods[:3]), tmp_path)  # the others failed
