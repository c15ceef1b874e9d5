"""ACC and BWT against matrices worked out by hand."""

import math

import pytest

from fusion_bench_nufilt.continual import AccuracyMatrix


def matrix(rows, tasks="abc"):
    result = AccuracyMatrix(tasks)
    for step, row in enumerate(rows, 1):
        result.record(step, dict(zip(tasks, row, strict=False)))
    return result


def test_acc_is_the_mean_of_the_last_row_and_bwt_the_mean_change_since_each_tasks_own_step():
    filled = matrix([[0.9], [0.8, 0.7], [0.6, 0.65, 0.5]])
    assert filled.acc == pytest.approx((0.6 + 0.65 + 0.5) / 3)
    assert filled.bwt == pytest.approx(((0.6 - 0.9) + (0.65 - 0.7)) / 2)


def test_the_diagonal_and_the_last_row_are_all_that_is_needed():
    diagonal = matrix([[0.9], [math.nan, 0.7], [0.6, 0.65, 0.5]])
    assert diagonal.bwt == pytest.approx(((0.6 - 0.9) + (0.65 - 0.7)) / 2)


def test_the_last_row_alone_has_acc_but_no_bwt():
    last = AccuracyMatrix("abc")
    last.record(3, {"a": 0.6, "b": 0.65, "c": 0.5})
    assert last.acc == pytest.approx(0.58333333)
    assert math.isnan(last.bwt)


def test_a_missing_task_is_left_out_and_named():
    missing = matrix([[0.9], [0.8], [0.6]])
    missing.record(3, {"c": 0.5, "b": math.nan})
    assert missing.missing == ["b"]
    assert missing.acc == pytest.approx(0.55)
    assert missing.bwt == pytest.approx(-0.3)


def test_one_task_has_no_backward_transfer():
    single = matrix([[0.9]], tasks="a")
    assert single.acc == 0.9
    assert math.isnan(single.bwt)


def test_nothing_measured_is_not_a_number():
    empty = AccuracyMatrix("ab")
    assert math.isnan(empty.acc)
    assert math.isnan(empty.bwt)
    assert empty.missing == ["a", "b"]


def test_plasticity_is_the_mean_of_the_diagonal():
    assert matrix([[0.9], [0.8, 0.7], [0.6, 0.65, 0.5]]).plasticity == pytest.approx(0.7)
    assert matrix([[0.9], [math.nan, math.nan], [0.6, 0.65, 0.5]]).plasticity == pytest.approx(0.7)
    assert math.isnan(AccuracyMatrix("ab").plasticity)


def test_the_mean_of_the_tasks_seen_needs_them_all():
    assert matrix([[0.9], [0.8, 0.7], [0.6, 0.65, 0.5]]).mean_seen == pytest.approx([0.9, 0.75, 0.58333333])
    diagonal = matrix([[0.9], [math.nan, 0.7], [0.6, 0.65, 0.5]]).mean_seen
    assert math.isnan(diagonal[1])
    assert diagonal[[0, 2]] == pytest.approx([0.9, 0.58333333])


def test_a_task_that_never_gets_a_score_is_not_waited_for():
    nan = math.nan
    assert matrix([[0.9], [0.8, nan], [0.6, nan, 0.5]]).mean_seen == pytest.approx([0.9, 0.8, 0.55])
    assert math.isnan(matrix([[nan], [nan, 0.7], [nan, 0.6, 0.5]]).mean_seen[0])


def test_rows_and_back_are_the_same():
    filled = matrix([[0.9], [math.nan, 0.7], [0.6, 0.65, 0.5]])
    assert filled.rows()[1] == [None, 0.7, None]
    again = AccuracyMatrix.from_rows(filled.tasks, filled.rows())
    assert again.rows() == filled.rows()


def test_fwt_is_the_mean_score_of_the_tasks_still_to_come():
    filled = matrix([[0.9, 0.2, 0.4], [0.8, 0.7, 0.1], [0.6, 0.65, 0.5]])
    assert filled.fwt == pytest.approx(((0.2 + 0.4) / 2 + 0.1) / 2)
    assert math.isnan(matrix([[0.9], [0.8, 0.7], [0.6, 0.65, 0.5]]).fwt)
    assert math.isnan(matrix([[0.9]], tasks="a").fwt)
