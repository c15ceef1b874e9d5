"""A comparison's scores and pictures reach a tracker that `fabric/loggers=` names."""

import csv

import pytest

from fusion_bench_nufilt.compare.configs import is_tracker, make_trackers
from tests.compare.helpers import SCORES, comparison, failed, finished


def test_tensorboard_gets_every_score_the_means_and_the_pictures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (logger,) = make_trackers(["modelpool=nufilt_demo", "fabric/loggers=tensorboard_logger"], tmp_path)
    found = comparison({"one": [finished(42), finished(43, -0.1)], "two": [finished(42), failed(43)]})
    files = found.save(tmp_path)
    found.log([logger], [tmp_path / name for name in files if name.endswith(".png")])
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = set(events.Tags()["scalars"])
    assert {f"one/seed {seed}/{task}" for seed in (42, 43) for task in SCORES} <= scalars
    assert "two/seed 42/a" in scalars
    assert "two/seed 43/a" not in scalars
    (acc,) = events.Scalars("two/ACC")
    assert (acc.step, acc.value) == (3, pytest.approx(0.6))
    assert {"accuracy_matrices", "stability_plasticity"} <= set(events.Tags()["images"])


def test_csv_has_a_row_for_each_step(tmp_path):
    (logger,) = make_trackers(["fabric/loggers=csv_logger"], tmp_path)
    comparison({"one": [finished(42)]}).log([logger], [])
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["one/ACC"]) == pytest.approx(0.6)
    assert sum(bool(row["one/seed 42/a"]) for row in rows) >= 1


def test_only_what_names_a_tracker_makes_one(tmp_path):
    assert make_trackers(["modelpool=nufilt_demo", "fabric.precision=32"], tmp_path) == []
    assert is_tracker("fabric.loggers.name=x")
    assert not is_tracker("fabric.precision=32")
    with pytest.raises(ValueError, match="fabric/loggers/nothing"):
        make_trackers(["fabric/loggers=nothing"], tmp_path)
    with pytest.raises(ValueError, match=r"say fabric\.loggers\.project=NAME"):
        make_trackers(["fabric/loggers=wandb_logger"], tmp_path)
