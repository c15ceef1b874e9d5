"""Means and deviations over seeds, by hand."""

import math

import pytest

from fusion_bench_nufilt.results.metrics import Mean
from tests.compare.helpers import SCORES, comparison, failed, finished


def test_mean_and_sample_deviation():
    mean = Mean.of([0.1, 0.2, 0.6])
    assert (mean.mean, mean.std, mean.count) == pytest.approx((0.3, math.sqrt(0.07), 3))
    assert mean.percent() == "30.0 ± 26.5"


def test_one_value_has_no_deviation_and_none_no_mean():
    assert Mean.of([0.5, math.nan]).percent(sign=True) == "+50.0"
    assert Mean.of([math.nan]).percent() == "-"
    assert Mean.of([]).as_json() == {"mean": None, "std": None, "count": 0}


def method(*runs):
    return comparison({"m": list(runs)}).methods[0]


def test_acc_bwt_and_plasticity_are_means_of_the_runs():
    result = method(finished(42, change=-0.1), finished(43, change=-0.2))
    assert result.metrics["plasticity"].mean == pytest.approx(0.6)  # each task's own score, in any order
    assert result.metrics["BWT"].mean == pytest.approx(-(0.15 + 0.3) / 2)  # two changes and one, over two tasks
    assert result.metrics["ACC"].mean == pytest.approx(0.6 - 0.15)
    assert result.seconds.mean == 3.0


def test_a_tasks_score_is_found_by_name_whatever_the_order():
    runs = [finished(seed) for seed in (42, 43, 44)]
    assert len({tuple(run.matrix.tasks) for run in runs}) > 1
    result = method(*runs)
    assert {task: result.final(task).mean for task in SCORES} == pytest.approx(SCORES)
    assert result.final("a").std == pytest.approx(0)


def test_failed_runs_are_left_out_and_named_by_reason():
    result = method(finished(42), failed(43, "no"), failed(44, "no"), failed(45, "never"))
    assert result.metrics["ACC"].count == 1
    assert result.failures == {"no": [43, 44], "never": [45]}


def test_environments_that_differ_are_all_named():
    runs = [finished(42, environment={"torch": "2.13.0"}), finished(43, environment={"torch": "2.14.0"})]
    assert comparison({"m": runs}).environments == {"torch": "2.13.0 and 2.14.0"}
