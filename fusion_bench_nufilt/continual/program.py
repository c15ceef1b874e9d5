"""The connections of a run to the FusionBench program that it is part of."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fusion_bench.taskpool import DummyTaskPool
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from omegaconf import DictConfig
from torch import nn

from .evaluation import Report


def use_bundled_taskpool(program: Any) -> None:
    """Give the program the task pool that its model pool brings along, or one of the same name, unless one was named.

    FusionBench has a few pairs of the same name, such as ``modelpool=gpt-2_glue`` and ``taskpool=gpt-2_glue``.
    """
    if program._modelpool is None or not isinstance(program.taskpool, DummyTaskPool) or _taskpool_was_named():
        return
    taskpool = program._modelpool.get("taskpool") or _namesake()
    if taskpool is not None:
        program.taskpool = program._instantiate_and_setup(
            taskpool, compat_load_fn="fusion_bench.compat.taskpool.load_taskpool_from_config"
        )


def _namesake() -> DictConfig | None:
    """Return the task pool that has the model pool's name, if there is one."""
    if not HydraConfig.initialized():
        return None
    run = HydraConfig.get()
    name = run.runtime.choices.get("modelpool")
    if name not in GlobalHydra.instance().config_loader().get_group_options("taskpool"):
        return None
    return compose(run.job.config_name, overrides=[*run.overrides.task, f"taskpool={name}"]).taskpool


class ReportedTaskPool:
    """Answers FusionBench's evaluation of the merged model, after ``run``, with the report that the last step made."""

    def __init__(self, taskpool: Any, model: nn.Module, report: Report) -> None:
        self.taskpool, self.model, self.report = taskpool, model, report

    def evaluate(self, model: nn.Module, *args: Any, **kwargs: Any) -> Report:
        return self.report if model is self.model else self.taskpool.evaluate(model, *args, **kwargs)


def _taskpool_was_named() -> bool:
    """Return whether the user chose a task pool on the command line; FusionBench's default is a placeholder."""
    if not HydraConfig.initialized():
        return False
    return any(override.lstrip("+~").startswith("taskpool") for override in HydraConfig.get().overrides.task)


class InputError(CompactHydraException, ValueError):
    """An error in the input of a run, which Hydra prints without a trace."""


@contextmanager
def one_line_errors(program: Any) -> Iterator[None]:
    """Have `fusion_bench` say what is wrong with its input in one line.

    Whoever sets ``HYDRA_FULL_ERROR=1`` gets the trace from Hydra. It is not looked at here, because FusionBench's
    configuration sets it for the time of the run.

    Args:
        program: None outside `fusion_bench`, where nothing is changed.
    """
    try:
        yield
    except ValueError as error:
        if program is None:
            raise
        logging.getLogger("fusion_bench.scripts.cli").addFilter(_drop_trace)
        raise InputError(str(error)) from error


def _drop_trace(record: logging.LogRecord) -> bool:
    if record.exc_info and isinstance(record.exc_info[1], InputError):
        record.exc_info = None
    return True
