"""What a run has to do with the program of FusionBench that it is part of."""

from typing import Any

from fusion_bench.taskpool import DummyTaskPool
from hydra.core.hydra_config import HydraConfig
from torch import nn

from .evaluation import Report


def use_bundled_taskpool(program: Any) -> None:
    """Give the program the task pool that its model pool brings along, unless the user named one."""
    bundled = None if program._modelpool is None else program._modelpool.get("taskpool")
    if bundled is not None and isinstance(program.taskpool, DummyTaskPool) and not _taskpool_was_named():
        program.taskpool = program._instantiate_and_setup(
            bundled, compat_load_fn="fusion_bench.compat.taskpool.load_taskpool_from_config"
        )


class ReportedTaskPool:
    """Answers FusionBench's evaluation of the merged model, after ``run``, with the report that the last step made."""

    def __init__(self, taskpool: Any, model: nn.Module, report: Report) -> None:
        self.taskpool, self.model, self.report = taskpool, model, report

    def evaluate(self, model: nn.Module, *args: Any, **kwargs: Any) -> Report:
        return self.report if model is self.model else self.taskpool.evaluate(model, *args, **kwargs)


def _taskpool_was_named() -> bool:
    """Did the user choose a task pool on the command line? FusionBench's default one is a placeholder."""
    if not HydraConfig.initialized():
        return False
    return any(override.lstrip("+~").startswith("taskpool") for override in HydraConfig.get().overrides.task)
