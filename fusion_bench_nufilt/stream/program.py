"""How a run connects to the FusionBench program that it is part of, and to experiment trackers."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fusion_bench.taskpool import DummyTaskPool
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from PIL import Image
from torch import nn

log = logging.getLogger(__name__)


def use_bundled_taskpool(program: Any) -> None:
    """Unless the user named a task pool, use the one that the model pool brings along, or one of
    the same name.

    FusionBench has a few pairs of the same name, such as ``modelpool=gpt-2_glue`` and
    ``taskpool=gpt-2_glue``.
    """
    if (
        program is None
        or program._modelpool is None
        or not isinstance(program.taskpool, DummyTaskPool)
    ):
        return
    run = HydraConfig.get() if HydraConfig.initialized() else None
    if run is not None and any(
        word.lstrip("+~").startswith("taskpool") for word in run.overrides.task
    ):
        return
    if (taskpool := program._modelpool.get("taskpool") or (run and _namesake(run))) is not None:
        loader = "fusion_bench.compat.taskpool.load_taskpool_from_config"
        program.taskpool = program._instantiate_and_setup(taskpool, compat_load_fn=loader)


def _namesake(run: Any) -> Any:
    """Return the task pool that has the name of the model pool of a Hydra run, if there is one."""
    name = run.runtime.choices.get("modelpool")
    if name in GlobalHydra.instance().config_loader().get_group_options("taskpool"):
        return compose(
            run.job.config_name, overrides=[*run.overrides.task, f"taskpool={name}"]
        ).taskpool
    return None


class ReportedTaskPool:
    """Answers FusionBench's evaluation of the merged model, which follows ``run``, with the run's
    own report.
    """

    def __init__(self, taskpool: Any, model: nn.Module, report: dict[str, Any]) -> None:
        self.taskpool, self.model, self.report = taskpool, model, report

    def evaluate(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (
            self.report if model is self.model else self.taskpool.evaluate(model, *args, **kwargs)
        )


def log_picture(loggers: Sequence[Any], name: str, file: Path, step: int) -> None:
    """Give a picture to the trackers that take pictures; one that fails only warns, since the run's
    files are there.
    """
    for logger in loggers:
        try:
            if hasattr(logger, "log_image"):  # Weights & Biases, SwanLab
                logger.log_image(name, [str(file)], step=step)
            elif hasattr(logger.experiment, "add_image"):  # TensorBoard
                pixels = np.asarray(Image.open(file).convert("RGB"))
                logger.experiment.add_image(name, pixels, step, dataformats="HWC")
            elif hasattr(logger.experiment, "log_artifact"):  # MLflow
                logger.experiment.log_artifact(logger.run_id, str(file))
        except Exception as error:
            log.warning("%s did not take the picture '%s': %s", type(logger).__name__, name, error)


def finish_trackers(loggers: Sequence[Any], status: str) -> None:
    """Have trackers write what they hold; one that fails only warns, since the run's files are
    there.

    CSV files are written every hundred steps otherwise, and MLflow's runs stay "running".
    """
    for logger in loggers:
        try:
            logger.finalize(status)
        except Exception as error:
            log.warning("%s did not finish: %s", type(logger).__name__, error)
