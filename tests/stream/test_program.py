"""What is wrong with the input of a run is one line, and pictures reach the trackers that take
some.
"""

import io
import logging
import re
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from lightning.fabric.loggers import CSVLogger, TensorBoardLogger
from omegaconf import OmegaConf
from PIL import Image

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.baselines import SequentialFineTuning
from fusion_bench_nufilt.stream.program import checking_config, log_picture, one_line_errors

CLI = "fusion_bench.scripts.cli"


@one_line_errors()
def fail():
    raise ValueError("model 'task2'\nlacks layer '\x1b[31mfc1'")


@pytest.fixture
def hydra(monkeypatch):
    """Pretend that Hydra runs a program: FusionBench's, or a sweep of its runs, or one of someone
    else's.
    """

    def run(program="fusion_bench", mode=RunMode.RUN):
        monkeypatch.setattr(
            HydraConfig.instance(), "cfg", OmegaConf.create({"hydra": {"mode": mode}})
        )
        if program == "fusion_bench":
            monkeypatch.setitem(sys.modules, CLI, ModuleType(CLI))
        else:
            monkeypatch.delitem(sys.modules, CLI, raising=False)

    return run


def test_under_fusion_bench_it_is_the_one_line_that_python_prints_and_the_log_file_has_the_trace(
    hydra, tmp_path
):
    root, terminal, file = (
        logging.getLogger(),
        io.StringIO(),
        logging.FileHandler(tmp_path / "cli.log"),
    )
    handlers = [logging.StreamHandler(terminal), file]
    hydra()
    for handler in handlers:
        root.addHandler(handler)
    try:
        with pytest.raises(SystemExit) as caught:
            fail()
        logging.getLogger(CLI).error(caught.value, exc_info=caught.value)  # as FusionBench does
    finally:
        for handler in handlers:
            root.removeHandler(handler)
        file.close()
    assert caught.value.code == "model 'task2' lacks layer '\\x1b[31mfc1'"
    assert terminal.getvalue() == ""
    assert "Traceback" in (tmp_path / "cli.log").read_text()


@pytest.mark.parametrize("how", [{"mode": RunMode.MULTIRUN}, {"program": "another"}])
def test_in_a_sweep_and_another_program_it_is_of_the_kind_that_hydra_prints_in_one_line(
    caplog, hydra, how
):
    hydra(**how)
    with pytest.raises(
        CompactHydraException, match=r"^model 'task2' lacks layer '\\x1b\[31mfc1'$"
    ) as caught:
        fail()
    assert isinstance(caught.value, ValueError)
    logging.getLogger(CLI).error(caught.value, exc_info=caught.value)  # as FusionBench does
    assert "task2" in caplog.text
    assert "Traceback" not in caplog.text


def test_elsewhere_it_stays_what_it_is():
    with pytest.raises(ValueError, match="task2") as caught:
        fail()
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("algorithm", [NufiltContinualMergingAlgorithm, SequentialFineTuning])
def test_under_fusion_bench_an_option_of_a_wrong_value_is_one_line_too(hydra, algorithm):
    with pytest.raises(ValueError, match="seed must be a whole number") as caught:
        algorithm(seed=None)
    assert type(caught.value) is ValueError
    hydra()
    with pytest.raises(SystemExit, match=r"^seed must be a whole number, got None$"):
        algorithm(seed=None)


WRONG = {
    "modelpool.models must give each model a name, got 7": {"modelpool": {"models": 7}},
    "Recursive interpolation detected full_key: modelpool.seed object_type=dict": {
        "modelpool": {"seed": "${.seed}"}
    },
    "Interpolation key 'no' not found full_key: taskpool[0] object_type=list": {
        "modelpool": {},
        "taskpool": ["${no}"],
    },
}


@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_with_the_configuration_of_a_pool_is_one_line_for_methods_from_here_alone(
    hydra, line
):
    hydra()
    main = checking_config(lambda config: "done")
    for target, ours in (
        ("fusion_bench_nufilt.NufiltContinualMergingAlgorithm", True),
        ("fusion_bench.Ties", False),
    ):
        config = OmegaConf.create({"method": {"_target_": target}, **WRONG[line]})
        if ours:
            with pytest.raises(SystemExit, match=f"^{re.escape(line)}$"):
                main(config)
        else:
            assert main(config) == "done"
    assert (
        main(OmegaConf.create({"method": {"_target_": "fusion_bench_nufilt.X"}, "modelpool": {}}))
        == "done"
    )


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
