"""Each tracker that FusionBench has a configuration for gets what a run logs, and is finished."""

import csv
import shutil
import sys
from pathlib import Path
from types import ModuleType

import fusion_bench.constants
import lightning.pytorch.loggers
import pytest
from lightning.fabric.loggers import Logger

from fusion_bench_nufilt.compare.configs import make_trackers
from fusion_bench_nufilt.continual import layerwise

CONFIGS = Path(fusion_bench.constants.PROJECT_ROOT_PATH) / "fusion_bench_config"
NORM = "layers/task_norm"
STEPS = [1, 2, 3]


class StubTracker(Logger):
    """Notes what a tracker on the network would get."""

    name = version = "stub"
    log_dir = None

    def __init__(self, save_dir, **options):
        self.log_dir = save_dir
        self.steps = {}
        self.status = []
        type(self).made.append(self)

    def log_metrics(self, metrics, step=None):
        self.steps.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, *args, **kwargs):
        pass

    def finalize(self, status):
        self.status.append(status)


@pytest.fixture
def stubs(monkeypatch):
    """Put a stub in the place of each tracker's class; return those that are made."""
    StubTracker.made = []
    for module, name in (
        ("wandb.integration.lightning.fabric", "WandbLogger"),
        ("swanlab.integration.pytorch_lightning", "SwanLabLogger"),
    ):
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            package = ModuleType(".".join(parts[:count]))
            package.__path__ = []
            monkeypatch.setitem(sys.modules, package.__name__, package)
        monkeypatch.setattr(sys.modules[module], name, StubTracker, raising=False)
    monkeypatch.setattr(lightning.pytorch.loggers, "MLFlowLogger", StubTracker)
    return StubTracker.made


@pytest.fixture
def run(program):
    return lambda *words: program("taskpool=dummy", "method.save_on_every_step=false", *words)


def test_a_csv_file_has_every_step_also_of_a_run_that_goes_on(run):
    words = ("fabric/loggers=csv_logger", "method.save_on_every_step=true")
    logs = run(*words)
    for is_again in (False, True):
        if is_again:
            shutil.rmtree(logs / "checkpoints" / "merged_model_2")
            run(*words)
        with open(logs / "metrics.csv", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row[NORM]]
        assert [int(row["step"]) for row in rows] == STEPS
        assert all(float(row[NORM]) >= 0 for row in rows)
        # There is no filter before the second step, and so no number of it.
        assert [int(row["step"]) for row in rows if row["layers/filtered_share"]] == STEPS[1:]


def test_tensorboard_has_every_step(run):
    # The oldest release that can be written to can't be read from with NumPy 2.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run("fabric/loggers=tensorboard_logger")))
    events.Reload()
    assert [event.step for event in events.Scalars(NORM)] == STEPS


OTHERS = {
    "mlflow_logger": ["fabric.loggers.experiment_name=one", "fabric.loggers.run_name=first"],
    "wandb_logger": ["fabric.loggers.project=one"],
    "swandb_logger": [
        "fabric.loggers.project=one",
        "fabric.loggers._target_=swanlab.integration.pytorch_lightning.SwanLabLogger",
    ],
}


def test_others_that_fusionbench_has_a_configuration_for_are_made_of_it(stubs, tmp_path):
    names = {path.stem for path in (CONFIGS / "fabric" / "loggers").glob("*.yaml")}
    assert names == {"csv_logger", "tensorboard_logger", *OTHERS}
    for logger, words in OTHERS.items():
        make_trackers([f"fabric/loggers={logger}", *words], tmp_path)
    assert len(stubs) == len(OTHERS)


def test_others_get_every_step_and_are_finished_once(run, stubs):
    run("fabric/loggers=wandb_logger", *OTHERS["wandb_logger"])
    (tracker,) = stubs
    assert sorted(tracker.steps) == STEPS
    assert all(NORM in metrics for metrics in tracker.steps.values())
    assert tracker.status == ["success"]


def test_a_run_that_fails_leaves_what_was_logged_and_is_not_a_success(run, stubs, monkeypatch):
    merge = layerwise.do_jobs
    merged_steps = []

    def fail_at_step_3(*arguments):
        if len(merged_steps) == 2:
            raise ValueError("no step 3")
        merged_steps.append(arguments)
        return merge(*arguments)

    monkeypatch.setattr(layerwise, "do_jobs", fail_at_step_3)
    with pytest.raises(ValueError, match="no step 3"):
        run("fabric/loggers=wandb_logger", *OTHERS["wandb_logger"])
    (tracker,) = stubs
    assert sorted(tracker.steps) == [1, 2]
    assert tracker.status == ["failed"]


def test_a_tracker_that_cannot_finish_is_a_warning(run, stubs, monkeypatch, caplog):
    def refuse(self, status):
        raise OSError("offline")

    monkeypatch.setattr(StubTracker, "finalize", refuse)
    run("fabric/loggers=wandb_logger", *OTHERS["wandb_logger"])
    assert "StubTracker did not finish: offline" in caplog.text
