"""Which task pool scores a run; and pictures reach the trackers that take some."""

import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from lightning.fabric.loggers import CSVLogger, TensorBoardLogger
from PIL import Image

from fusion_bench_nufilt.continual.program import log_picture


def test_a_task_pool_that_is_named_wins_and_a_missing_task_is_shown_as_missing(program, capfd):
    words = ("taskpool=nufilt_demo", "~taskpool.test_datasets.digits", "method.evaluate=last")
    result = json.loads((program(*words) / "accuracy_matrix.json").read_text())
    assert sorted(result["tasks"]) == ["colours", "digits", "shapes"]
    assert result["missing"] == ["digits"]
    assert result["ACC"] is not None
    assert "no score for digits" in " ".join(capfd.readouterr().out.split())


def test_the_placeholder_where_it_is_named_means_no_scores(program):
    logs = program("taskpool=dummy", "method.save_on_every_step=false")
    written = {path.name for path in logs.iterdir()}
    assert not {"accuracy_matrix.json", "checkpoints"} & written


@pytest.fixture
def picture(tmp_path):
    file = tmp_path / "picture.png"
    Image.fromarray(np.zeros((4, 6, 3), dtype=np.uint8)).save(file)
    return file


def test_tensorboard_gets_the_picture_and_csv_none(picture, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tensorboard = TensorBoardLogger(tmp_path / "events", name="", version="")
    log_picture([CSVLogger(tmp_path / "csv"), tensorboard], "accuracy_matrix", picture, 3)
    tensorboard.experiment.flush()
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    (found,) = events.Images("accuracy_matrix")
    assert (found.step, found.width, found.height) == (3, 6, 4)


def test_others_get_it_by_their_own_methods(picture):
    got = []
    wandb = SimpleNamespace(log_image=lambda name, images, step: got.append((name, images, step)))
    mlflow = SimpleNamespace(
        run_id="7",
        experiment=SimpleNamespace(log_artifact=lambda run, file: got.append((run, file))),
    )
    log_picture([wandb, mlflow], "matrix", picture, 2)
    assert got == [("matrix", [str(picture)], 2), ("7", str(picture))]


def test_a_tracker_that_fails_is_a_warning(picture, caplog):
    def refuse(*_, **__):
        raise OSError("offline")

    with caplog.at_level(logging.WARNING):
        log_picture([SimpleNamespace(log_image=refuse)], "matrix", picture, 1)
    assert "did not take the picture 'matrix': offline" in caplog.text
