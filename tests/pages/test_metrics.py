"""ACC, BWT and the others against matrices worked out by hand."""

import math

import pytest

from fusion_bench_nufilt.continual import AccuracyMatrix
from fusion_bench_nufilt.pages.metrics import METRICS, as_shown, percent

NAN = math.nan
FULL = [[0.9], [0.8, 0.7], [0.6, 0.65, 0.5]]
DIAGONAL = [[0.9], [NAN, 0.7], [0.6, 0.65, 0.5]]


def matrix(rows, tasks="abc"):
    result = AccuracyMatrix(tasks)
    for step, row in enumerate(rows, 1):
        result.record(step, dict(zip(tasks, row, strict=False)))
    return result


def test_tasks_without_a_final_score_are_named():
    assert matrix([[0.9], [0.8], [0.6, NAN, 0.5]]).missing == ["b"]
    assert AccuracyMatrix("ab").missing == ["a", "b"]


@pytest.mark.parametrize(
    ("rows", "means"),
    [
        (FULL, [0.9, 0.75, 0.58333333]),
        (DIAGONAL, [0.9, NAN, 0.58333333]),
        # A task that never gets a score is not waited for.
        ([[0.9], [0.8, NAN], [0.6, NAN, 0.5]], [0.9, 0.8, 0.55]),
        ([[NAN], [NAN, 0.7], [NAN, 0.6, 0.5]], [NAN, 0.7, 0.55]),
    ],
)
def test_the_mean_of_the_tasks_seen_needs_them_all(rows, means):
    assert matrix(rows).mean_seen == pytest.approx(means, nan_ok=True)


def test_rows_and_back_are_the_same():
    filled = matrix(DIAGONAL)
    assert filled.rows()[1] == [None, 0.7, None]
    assert AccuracyMatrix.from_rows(filled.tasks, filled.rows()).rows() == filled.rows()


def test_a_number_as_shown_is_that_of_its_digits():
    # Python's round would make the first one 60.3.
    assert as_shown(0.6025) == as_shown(0.60249) == float(percent(0.6025)) == 60.2
    assert math.isnan(as_shown(NAN))


def test_no_number_is_called_forward_transfer():
    assert "FWT" not in METRICS
    assert METRICS["zero_shot"].title == "zero-shot %"
    filled = matrix([[0.9, 0.2], [0.8, 0.7]], tasks="ab")
    assert filled.metrics()["zero_shot"] == pytest.approx(0.2)
    assert "zero-shot 20.0" in filled.summary()
