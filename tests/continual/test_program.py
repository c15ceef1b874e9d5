"""What is wrong with the input of a run is one line, and pictures reach the trackers that take some."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from lightning.fabric.loggers import CSVLogger, TensorBoardLogger
from PIL import Image

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.baselines import SequentialFineTuning
from fusion_bench_nufilt.continual.program import log_picture, one_line_errors


@one_line_errors()
def fail():
    raise ValueError("model 'task2'\nlacks layer '\x1b[31mfc1'")


def test_under_fusion_bench_it_is_of_the_kind_that_hydra_prints_in_one_line(caplog, monkeypatch):
    monkeypatch.setattr(HydraConfig, "initialized", lambda: True)
    with pytest.raises(CompactHydraException, match=r"^model 'task2' lacks layer '\\x1b\[31mfc1'$") as caught:
        fail()
    assert isinstance(caught.value, ValueError)
    logging.getLogger("fusion_bench.scripts.cli").error(caught.value, exc_info=caught.value)  # as FusionBench does
    assert "task2" in caplog.text
    assert "Traceback" not in caplog.text


def test_elsewhere_it_stays_what_it_is():
    with pytest.raises(ValueError, match="task2") as caught:
        fail()
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("algorithm", [NufiltContinualMergingAlgorithm, SequentialFineTuning])
def test_under_fusion_bench_an_option_of_a_wrong_value_is_one_line_too(monkeypatch, algorithm):
    with pytest.raises(ValueError, match="seed must be a whole number") as caught:
        algorithm(seed=None)
    assert type(caught.value) is ValueError
    monkeypatch.setattr(HydraConfig, "initialized", lambda: True)
    with pytest.raises(CompactHydraException, match="seed must be a whole number, got None"):
        algorithm(seed=None)


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
        run_id="7", experiment=SimpleNamespace(log_artifact=lambda run, file: got.append((run, file)))
    )
    log_picture([wandb, mlflow], "matrix", picture, 2)
    assert got == [("matrix", [str(picture)], 2), ("7", str(picture))]


def test_a_tracker_that_fails_is_a_warning(picture, caplog):
    def refuse(*_, **__):
        raise OSError("offline")

    with caplog.at_level(logging.WARNING):
        log_picture([SimpleNamespace(log_image=refuse)], "matrix", picture, 1)
    assert "did not take the picture 'matrix': offline" in caplog.text
