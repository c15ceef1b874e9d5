"""What is wrong with the input of a run of `fusion_bench` is said in one line.

Hydra calls :class:`OneLineErrors` before and after each run, since the configuration of every
method here names it (config/nufilt/errors.yaml).
"""

import logging
import os
import re
from traceback import walk_tb
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import CompactHydraException, InstantiationException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from fusion_bench_nufilt.utils.files import message_in_one_line, printable

log = logging.getLogger(__name__)

#: A hub out of reach and a full disk are an OSError.
_OF_THE_INPUT = (ValueError, OSError, ImportError, OmegaConfBaseException, InstantiationException)
_REMEDIES = {
    "taskpool.tasks": "add taskpool.tasks={MODEL: TASK}, with lm-eval's task for each model",
    "method.base_method": "name a method of FusionBench, such as "
    "+method@method.base_method=dare/task_arithmetic",
    # FusionBench's configuration has another name than the package.
    "swandb": "pip install swanlab, and add "
    "fabric.loggers._target_=swanlab.integration.pytorch_lightning.SwanLabLogger",
}


class InputError(CompactHydraException):
    """What is wrong with the input of one run of a sweep; Hydra prints it without a trace."""


class OneLineErrors(Callback):
    """Says what is wrong with the input of a run in one line; the log file has the trace.

    With ``HYDRA_FULL_ERROR=1``, and for errors of another kind, Hydra's report stays.
    """

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Keep the trace, which FusionBench logs, off the terminal."""
        for handler in logging.getLogger().handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.addFilter(_WithoutTraces(config))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """End the process with the line; in a sweep, log it and let the other runs go on."""
        if job_return.status != JobStatus.FAILED or os.environ.get("HYDRA_FULL_ERROR") == "1":
            return
        # Hydra's property `return_value` would raise the error in place of returning it.
        error = job_return._return_value
        line = what_is_wrong(error, config)
        if line is None:
            return
        if config.hydra.mode != RunMode.MULTIRUN:
            raise SystemExit(line) from error  # Python prints it
        log.error(line)
        job_return.return_value = InputError(line)


class _WithoutTraces(logging.Filter):
    def __init__(self, config: DictConfig) -> None:
        super().__init__()
        self._config = config

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.exc_info:
            return True
        error = record.exc_info[1]
        # After Ctrl-C, the line has been said where it was caught.
        return not isinstance(error, SystemExit) and what_is_wrong(error, self._config) is None


def what_is_wrong(error: Any, config: DictConfig) -> str | None:
    """Return a line that says what is wrong with the input of a run, or None for another error.

    Args:
        error: what the run ended with.
        config: its configuration, with the method and the pools.
    """
    if _is_of_fabric(error):
        return _wrong_fabric(error, config)
    missing_package = _missing_package(error)
    if missing_package is not None:
        remedy = _REMEDIES.get(missing_package, f"pip install {missing_package}")
        return f"the package '{missing_package}' is not installed: {remedy}"
    if isinstance(error, ImportError) and error.name == "typing":
        # As some of FusionBench's classes of pools do.
        return f"this needs a newer Python, such as 3.12: {message_in_one_line(error)}"
    if isinstance(error, MissingMandatoryValue):
        section = str(error.full_key).partition(".")[0]
        keys = [str(error.full_key)]
        if section in config:
            keys = sorted(OmegaConf.missing_keys(config[section]))
        remedies = [_REMEDIES.get(key, f"add {key}=VALUE") for key in keys]
        return f"{', '.join(keys)}: no value; {', '.join(remedies)}"
    missing_argument = _missing_argument(error)
    if missing_argument is not None:
        return _where_to_add(*missing_argument, config)
    models = OmegaConf.select(config, "modelpool.models", default={})
    if not OmegaConf.is_dict(models) and not isinstance(models, dict):
        return f"modelpool.models must give each model a name, got {models!r}"
    if isinstance(error, OmegaConfBaseException):
        error = _with_its_place(error, config)
    if isinstance(error, _OF_THE_INPUT):
        return printable(message_in_one_line(error))
    return None


def _is_of_fabric(error: Any) -> bool:
    """Tell whether Lightning raised an error when it chose devices, strategy and precision."""
    if not isinstance(error, Exception):
        return False
    modules = [frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)]
    return "lightning.fabric.connector" in modules


def _wrong_fabric(error: Exception, config: DictConfig) -> str:
    """Return what Lightning says of the devices of a run, with a choice that works everywhere."""
    message = message_in_one_line(error).rstrip(".")
    accelerator = OmegaConf.select(config, "fabric.accelerator", default="auto")
    # Of kinds of devices Lightning raises ValueErrors, which list those that there are.
    if accelerator in ("auto", "cpu") or isinstance(error, ValueError):
        return f"fabric: {message}"
    return f"fabric.accelerator={accelerator}: {message}; choose fabric.accelerator=cpu"


def _with_its_place(error: Exception, config: DictConfig) -> Exception:
    """Return the same error as OmegaConf raises it where it names the key."""
    for section in config:
        if section == "hydra" or not OmegaConf.is_config(config._get_node(section)):
            continue
        try:
            OmegaConf.to_container(config[section], resolve=True)
        except OmegaConfBaseException as with_place:
            return with_place
    return error


def _where_to_add(name: str, argument: str, config: DictConfig) -> str | None:
    for section in ("method", "modelpool", "taskpool", "modelpool.taskpool"):
        target = str(OmegaConf.select(config, f"{section}._target_"))
        if target.rpartition(".")[2] == name:
            return (
                f"{section} lacks '{argument}', which {name} needs: "
                f"add +{section}.{argument}=VALUE, or a line '{argument}: VALUE' to its file"
            )
    return None


def _missing_package(error: Any) -> str | None:
    """Return the package that a `_target_` of the configuration needs and that isn't installed."""
    if not isinstance(error, InstantiationException):
        return None
    cause = error.__cause__
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError) and cause.name is not None:
            return cause.name.partition(".")[0]
        cause = cause.__cause__ or cause.__context__
    return None


def _missing_argument(error: Any) -> tuple[str, str] | None:
    """Return the class of a TypeError and the argument that its configuration lacks."""
    if not isinstance(error, TypeError):
        return None
    match = re.search(r"(\w+)\.__init__\(\) missing .* argument.?: '(\w+)'", str(error))
    if match is None:
        return None
    return match[1], match[2]
