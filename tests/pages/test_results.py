"""The long table: what is a row of it, and what is found in it by what it belongs to."""

import math
from dataclasses import replace

import pandas as pd
import pytest

from fusion_bench_nufilt.pages.layers import layer_means
from fusion_bench_nufilt.pages.results import layer_rows, long_table, rows_with, score_rows
from tests.compare.helpers import SCORES, comparison, failed, finished
from tests.pages.sizes import sensitivity_of
from tests.pages.test_metrics import matrix

B32 = "clip-vit-base-patch32_TA8"


def test_a_score_that_was_not_measured_has_no_row():
    rows = long_table(score_rows(matrix([[0.9], [math.nan, 0.7]], tasks="ab")))
    scores = rows_with(rows, metric="score")
    measured = scores[["step", "task", "value"]].to_numpy().tolist()
    assert measured == [[1, "a", 0.9], [2, "b", 0.7]]
    assert set(rows["metric"]) == {"score", "seen", "ACC", "plasticity"}
    assert rows["value"].notna().all()


def test_every_number_of_a_comparison_is_one_row_with_what_it_belongs_to():
    ten = [finished(seed, memory=10**9) for seed in range(42, 52)]
    result = comparison({"nufilt": ten, "never": [failed(42)]}, modelpool=B32)
    keys = ["method", "seed", "step", "task", "layer", "metric"]
    assert not result.table.duplicated(keys).any()
    assert set(result.table["modelpool"]) == {B32}
    assert "never" not in set(result.table["method"])
    assert set(rows_with(result.table, metric="memory")["seed"]) == set(range(42, 52))
    one = rows_with(result.table, method="nufilt", metric="score", seed=42, step=3, task="a")
    assert one["value"].item() == SCORES["a"]


def test_a_layer_has_a_row_for_each_quantity_that_its_method_measured():
    table = {"step": [1, 2], "task": ["a", "b"], "layer": ["l", "l"], "overlap": [math.nan, 0.5]}
    rows = layer_rows(pd.DataFrame({**table, "task_norm": [1.0, 2.0], "of mine": [3.0, 4.0]}))
    found = [tuple(row) for row in rows[["step", "metric", "value"]].to_numpy()]
    assert found == [(2, "overlap", 0.5), (1, "task_norm", 1.0), (2, "task_norm", 2.0)]


def test_a_panels_methods_are_found_by_their_options_whatever_their_labels():
    result = sensitivity_of(3)
    methods = {f"renamed {number}": row for number, row in enumerate(result.methods.values())}
    renamed = replace(result, methods=methods)
    for panel in result.panels:
        curve = list(result.curve(panel).values())
        assert list(renamed.curve(panel).values()) == curve
        assert len(curve) == len(panel["values"])


def test_a_mean_over_steps_is_over_those_that_have_the_quantity():
    """The first step has no filter, and says 0 of what it would have taken."""
    steps = {"step": [1, 2, 3], "task": ["a", "b", "c"], "layer": "mlp.fc1"}
    measured = {
        "filtered_share": [0.0, 1.0, 1.0],
        "overlap": [0.0, 0.5, 0.25],
        "protected_rank": [0.0, 8.0, 8.0],
    }
    losses = {"loss_after": [0.0, 2.0, 4.0], "merged_norm": [0.0, 3.0, 5.0], "task_norm": 1.0}
    rows = layer_rows(pd.DataFrame({**steps, **measured, **losses}))
    means_by_layer = layer_means(rows, ["layer"])
    assert means_by_layer["share filtered"].item() == 1.0
    assert means_by_layer["overlap of subspaces"].item() == 0.375
    assert means_by_layer["norm of task vectors"].item() == pytest.approx(3**0.5)
    by_metric = rows.groupby("metric")["value"].mean()
    assert by_metric["loss_after"] == 3.0
    assert by_metric["merged_norm"] == 4.0
