"""How a run connects to the FusionBench program that it is part of, and to experiment trackers."""

import json
import logging
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache, partialmethod
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import lightning
from fusion_bench import set_print_function_call_permeanent
from fusion_bench.programs import FabricModelFusionProgram, fabric_fusion_program
from fusion_bench.taskpool import DummyTaskPool
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict
from rich.logging import RichHandler
from torch import nn
from transformers.utils import logging as transformers_logging

from fusion_bench_nufilt.methods.options import (
    METHOD_TABLE,
    DeviceConfig,
    ProtocolConfig,
    TargetConfig,
)
from fusion_bench_nufilt.utils.files import FullDiskError, write_text
from fusion_bench_nufilt.utils.logs import TerminalLog

log = logging.getLogger(__name__)

#: FusionBench's task pools ask for eight processes and pinned memory on every machine.
_OF_DATA_LOADERS = ("This DataLoader will create 8 worker", "'pin_memory' argument is set as true")
# FusionBench's program, for which `ContinualMergingProgram` stands in.
_FUSION_BENCH = "fusion_bench.programs.FabricModelFusionProgram"


class QuietTerminal(Callback):
    """Has a run of `fusion_bench` print what it does and what came of it, and little else.

    Hydra calls it, since the configuration of every method here names it
    (config/nufilt/terminal.yaml). What the user typed wins.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        typed = [word.lstrip("+").partition("=")[0] for word in config.hydra.overrides.task]
        with open_dict(config):
            for key in ("print_config", "print_function_call"):
                if key not in typed:
                    config[key] = False
            # A program of the user's own is left as it is.
            if config._target_ == _FUSION_BENCH:
                config._target_ = f"{__name__}.ContinualMergingProgram"
        set_print_function_call_permeanent(config.print_function_call)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the log above the bars of a run, if it goes to the terminal as FusionBench has it;
        refuse options of the method that were typed as FusionBench's.
        """
        try:
            refuse_misplaced(config, config.hydra.overrides.task)
        except ValueError as error:
            raise SystemExit(str(error)) from None  # of another error, Hydra would only warn
        _quiet_libraries()
        root = logging.getLogger()
        for handler in list(root.handlers):
            if type(handler) is not RichHandler:
                continue
            log_above_bars = TerminalLog(handler.console)
            log_above_bars.setLevel(handler.level)
            for log_filter in handler.filters:
                log_above_bars.addFilter(log_filter)
            root.removeHandler(handler)
            root.addHandler(log_above_bars)


@cache
def _quiet_libraries() -> None:
    """Quieten what is no news of FusionBench, transformers, datasets and torch, once."""
    # A pool of FusionBench remarks on each key for which it has no use, such as the task pool
    # that a model pool here brings along.
    logging.getLogger("fusion_bench.mixins.serialization").setLevel(logging.ERROR)
    # The bars of what a run does, and its files, say which models are loaded.
    logging.getLogger("fusion_bench.modelpool").setLevel(logging.WARNING)
    # Its loggers for the first process are apart from all others.
    fabric_fusion_program.log.setLevel(logging.WARNING)
    # A bar for every model that is loaded or saved would be most of the output.
    transformers_logging.disable_progress_bar()
    # One for each split of a data set is gone when it is ready, and none is in a file.
    datasets.utils.tqdm.__init__ = partialmethod(
        datasets.utils.tqdm.__init__, leave=False, disable=None
    )
    for message in _OF_DATA_LOADERS:
        warnings.filterwarnings("ignore", message, UserWarning, r"torch\.utils\.data")


class ContinualMergingProgram(FabricModelFusionProgram):
    """FusionBench's program, for a method that saves and scores every step by itself.

    FusionBench's own prints at the end that no model was saved, and the last report as JSON.
    """

    def run(self) -> dict[str, Any]:
        """Run the method, and return the merged model and the report of its last step."""
        refuse_several_processes(self.config)
        report_save_path = self.report_save_path
        # FusionBench would write it in place, and a kill would leave half of it.
        self.report_save_path = None
        with (
            patch.object(fabric_fusion_program, "print_json"),
            says_how_to_go_on(str(self.log_dir)),
        ):
            result: dict[str, Any] = super().run()
        if report_save_path is not None and result["report"] is not None:
            path = Path(report_save_path.format(log_dir=self.log_dir))
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(result["report"]))
            self.log_artifact(local_path=str(path))
        return result

    def save_merged_model(self, merged_model: Any) -> None:
        if self.merged_model_save_path is not None:
            super().save_merged_model(merged_model)


def refuse_misplaced(config: DictConfig, words: Sequence[str]) -> None:
    """Raise a ValueError for an option of a method at the top level of a composed configuration,
    where ``+null_rank=5`` puts it and nothing reads it.

    FusionBench has a seed of its own there, which must not be the only one among the ``words`` of
    the user.
    """
    kinds = [entry.Options for entry in METHOD_TABLE.values()]
    kinds += [TargetConfig, DeviceConfig, ProtocolConfig]
    options = {field.name for field in chain.from_iterable(map(fields, kinds))}
    options.update(name for name in config.method if not str(name).startswith("_"))
    for name in sorted(options & config.keys()):
        if name == "seed" and (
            config.seed is None or any(word.startswith("method.seed=") for word in words)
        ):
            continue
        spelling = f"method.{name}={config[name]}"
        if name == "seed":
            spelling += f", or in a comparison --seeds {config.seed}"
        raise ValueError(f"{name} is an option of the method, not of the program: say {spelling}")


@contextmanager
def says_how_to_go_on(log_dir: str) -> Iterator[None]:
    """End a run after Ctrl-C, or on a full disk, with a line that says how to go on."""
    remedy = f"the same command with path.log_dir={Path(log_dir)} goes on after the last whole step"
    try:
        yield
    except KeyboardInterrupt:
        log.warning("interrupted; %s", remedy)
        raise SystemExit(128 + signal.SIGINT) from None
    except FullDiskError as error:
        raise FullDiskError(f"{error}: {remedy}") from error


def refuse_several_processes(config: DictConfig) -> None:
    """Raise a ValueError for a configuration of Fabric that has more than one process, before it
    launches them: they would wait for each other.
    """
    options = {}
    for name in ("accelerator", "strategy", "devices"):
        if isinstance(config.fabric.get(name), str | int):
            options[name] = config.fabric[name]
    if getattr(lightning.Fabric(**options).strategy, "num_processes", 1) > 1:
        raise ValueError("continual merging runs in one process: set fabric.devices=1")


def use_bundled_taskpool(program: Any) -> None:
    """Unless the user named a task pool, use the one that the model pool brings along."""
    if program is None or program._modelpool is None:
        return
    # Hydra expands the task pool last, so that a model pool's file can't override it. The pool's
    # placeholder tells that the user named none.
    if not isinstance(program.taskpool, DummyTaskPool):
        return
    if HydraConfig.initialized():
        for word in HydraConfig.get().overrides.task:
            if word.lstrip("+~").startswith("taskpool"):
                return
    taskpool = program._modelpool.get("taskpool")
    if taskpool:
        loader = "fusion_bench.compat.taskpool.load_taskpool_from_config"
        program.taskpool = program._instantiate_and_setup(taskpool, compat_load_fn=loader)


class ReportedTaskPool:
    """Answers FusionBench's evaluation of the merged model, which follows ``run``, with the run's
    own report.
    """

    def __init__(self, taskpool: Any, model: nn.Module, report: dict[str, Any]) -> None:
        self.taskpool = taskpool
        self.model = model
        self.report = report

    def evaluate(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if model is self.model:
            return self.report
        return self.taskpool.evaluate(model, *args, **kwargs)


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
