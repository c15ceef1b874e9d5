"""Pictures reach the trackers that take some."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from lightning.fabric.loggers import CSVLogger, TensorBoardLogger
from PIL import Image

from fusion_bench_nufilt.stream.program import log_picture


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
