"""Means and deviations over seeds, by hand; and what reaches a tracker that `fabric/loggers=`
names.
"""

import math
from itertools import product

import pytest

from fusion_bench_nufilt.compare.configs import is_tracker, make_trackers
from fusion_bench_nufilt.compare.summary import log_comparison
from fusion_bench_nufilt.pages.metrics import Mean
from tests.compare.helpers import SCORES, comparison, failed, finished, mean_of


def test_one_value_has_no_deviation_and_none_no_mean():
    assert Mean.of([0.5, math.nan]).percent(sign=True) == "+50.0"
    assert Mean.of([math.nan]).percent() == "-"
    assert Mean.of([]).as_json() == {"mean": None, "std": None, "count": 0}


def one_method(*runs):
    return comparison({"m": list(runs)})


def test_failed_runs_are_left_out_and_named_by_reason():
    runs = [finished(42), failed(43, "no"), failed(44, "no"), failed(45, "never")]
    result = one_method(*runs)
    assert mean_of(result, "m", "ACC").count == 1
    assert result.methods["m"].failures == {"no": [43, 44], "never": [45]}


def test_a_method_that_is_named_like_the_single_models_is_refused():
    with pytest.raises(ValueError, match=r"methods\.pretrained.*single models"):
        comparison({"pretrained": [finished(42)]})


def test_environments_that_differ_are_all_named():
    runs = [
        finished(42, environment={"torch": "2.13.0"}),
        finished(43, environment={"torch": "2.14.0"}),
    ]
    assert comparison({"m": runs}).environment == {"torch": "2.13.0 and 2.14.0"}


# --- trackers ---


def test_tensorboard_gets_every_score_and_the_means(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (logger,) = make_trackers(
        ["modelpool=nufilt_demo", "fabric/loggers=tensorboard_logger"], tmp_path
    )
    found = comparison(
        {"one": [finished(42), finished(43, -0.1)], "two": [finished(42), failed(43)]}
    )
    log_comparison(found, [logger])
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = set(events.Tags()["scalars"])
    assert {f"one/seed {seed}/{task}" for seed, task in product((42, 43), SCORES)} <= scalars
    assert "two/seed 42/a" in scalars
    assert "two/seed 43/a" not in scalars
    (acc,) = events.Scalars("two/ACC")
    assert (acc.step, acc.value) == (3, pytest.approx(0.6))


def test_only_what_names_a_tracker_makes_one(tmp_path):
    assert make_trackers(["modelpool=nufilt_demo", "fabric.precision=32"], tmp_path) == []
    assert is_tracker("fabric.loggers.name=x")
    assert not is_tracker("fabric.precision=32")
    with pytest.raises(ValueError, match="fabric/loggers/nothing"):
        make_trackers(["fabric/loggers=nothing"], tmp_path)
    with pytest.raises(ValueError, match=r"say fabric\.loggers\.project=NAME"):
        make_trackers(["fabric/loggers=wandb_logger"], tmp_path)
