"""How a run connects to the FusionBench program that it is part of, and to experiment trackers."""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
from fusion_bench.taskpool import DummyTaskPool
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from PIL import Image
from torch import nn

from fusion_bench_nufilt.storage.files import printable

log = logging.getLogger(__name__)


class InputError(CompactHydraException, ValueError):
    """An error in the input of a run, which Hydra prints without a trace."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Have `fusion_bench` end with a single line that says what is wrong with its input; elsewhere,
    change nothing.

    The log file of the run has the trace. In another Hydra program, or in a sweep, which goes on
    with its other runs, the run fails with an :class:`InputError` instead.
    """
    try:
        yield
    except (
        ValueError,
        OSError,
        ImportError,
    ) as error:  # a hub out of reach, or a full disk, is an OSError
        if not HydraConfig.initialized() or isinstance(error, InputError):
            raise
        for handler in logging.getLogger().handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.addFilter(_shorten)
        line = printable(" ".join(str(error).split()))
        alone = "fusion_bench.scripts.cli" in sys.modules and HydraConfig.get().mode == RunMode.RUN
        raise (SystemExit if alone else InputError)(
            line
        ) from error  # Python prints the line of a SystemExit


class OneLineErrors:
    """A base class whose subclasses report bad options in one line."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__init__ = one_line_errors()(cls.__init__)  # type: ignore[method-assign]


def checking_config(main: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
    """Have FusionBench's main function report in one line what is wrong with the configuration of
    our methods.
    """

    @wraps(main)
    def check_first(config: DictConfig) -> Any:
        if not str(config.get("method", {}).get("_target_", "")).startswith("fusion_bench_nufilt."):
            return main(config)
        with one_line_errors():
            _check_config(config)
            return main(config)

    return check_first


def _check_config(config: DictConfig) -> None:
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException:
        OmegaConf.to_container(config, resolve=True)  # its error names the place
        raise
    if not OmegaConf.is_dict(models := config.modelpool.get("models", config.modelpool)):
        raise ValueError(f"modelpool.models must give each model a name, got {models!r}")


def _shorten(record: logging.LogRecord) -> bool:
    """Keep the line that Python prints, and the trace of an :class:`InputError`, off the
    terminal.
    """
    error = record.exc_info and record.exc_info[1]
    if isinstance(error, InputError):
        record.exc_info = record.exc_text = None
    return not isinstance(error, SystemExit)


@one_line_errors()
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
