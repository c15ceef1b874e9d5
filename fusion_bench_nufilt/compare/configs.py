"""Compose the configuration that `fusion_bench` would, and make the objects that it would make from
it.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import fusion_bench.constants
from fusion_bench.utils import instantiate
from fusion_bench.utils.instantiate_utils import set_print_function_call
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException
from lightning import Fabric
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fusion_bench_nufilt.continual.errors import what_is_wrong
from fusion_bench_nufilt.continual.program import refuse_misplaced
from fusion_bench_nufilt.utils.files import message_in_one_line
from fusion_bench_nufilt.utils.options import unknown
from fusion_bench_nufilt.utils.overrides import (
    PLUGIN,
    key_of,
    refuse_unknown_names,
    user_folders,
    without_method,
)

PROGRAM = "fabric_model_fusion"


@contextmanager
def composing() -> Iterator[None]:
    """Turn an error of Hydra or OmegaConf into a ValueError of one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        line = what_is_wrong(error, DictConfig({})) or message_in_one_line(error)
        raise ValueError(line) from None


def compose_run(overrides: Sequence[str]) -> DictConfig:
    """Return what `fusion_bench` composes from overrides; a ValueError says why it can't."""
    # FusionBench would prefer a `config` in the current directory, even an empty one.
    with composing(), config_folders(overrides) as folders:
        refuse_unknown_names(overrides, folders)
        try:
            config = compose(PROGRAM, list(overrides))
        except ConfigCompositionException:
            _refuse_unknown_options(overrides, compose(PROGRAM, without_method(overrides)))
            raise
        refuse_misplaced(config, overrides)
        return config


def _refuse_unknown_options(words: Sequence[str], config: DictConfig) -> None:
    """Raise a ValueError for a word that sets an option that the configuration's method lacks."""
    for word in words:
        if not word.startswith("method."):
            continue
        section, _, name = key_of(word).rpartition(".")
        options = OmegaConf.select(config, section)
        if isinstance(options, DictConfig) and name not in options:
            names = [str(option) for option in options if not str(option).startswith("_")]
            raise ValueError(f"'{word}': {unknown('option', name, names)}")


@contextmanager
def config_folders(overrides: Sequence[str] = ()) -> Iterator[list[str]]:
    """Have Hydra compose within the block, with a file of the user's before one of this plugin's;
    yield the folders (``file://…``) in which it looks for them.
    """
    of_fusion_bench = Path(fusion_bench.constants.PROJECT_ROOT_PATH) / "fusion_bench_config"
    with initialize_config_dir(str(of_fusion_bench), version_base=None):
        search_path = GlobalHydra.instance().config_loader().get_search_path()
        for folder in user_folders(overrides):
            search_path.prepend("user", folder, anchor=PLUGIN)
        yield [element.path for element in search_path.get_path()]


def taskpool_config(config: DictConfig) -> DictConfig:
    """Return the task pool of a run: the one named, or else the one that the model pool brings
    along.
    """
    for taskpool in (config.get("taskpool"), config.modelpool.get("taskpool")):
        if taskpool is None:
            continue
        if not str(taskpool.get("_target_", "")).endswith("DummyTaskPool"):
            return taskpool
    raise ValueError(
        "the model pool brings no task pool, and nothing can be scored: add taskpool=NAME"
    )


def plain(config: DictConfig) -> Any:
    """Return a configuration as JSON has it, with all references to other values resolved."""
    with composing():
        return as_json(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))


def as_json(content: Any) -> Any:
    """Return content as it is read back from a file, so that what a kept run was made with compares
    as equal.
    """
    return json.loads(json.dumps(content, default=str))


def make(
    section: str, config: DictConfig, fabric: Fabric, load_v01: Callable[[DictConfig], Any]
) -> Any:
    """Make the method or a pool as FusionBench's program does; ``load_v01`` reads configs of
    FusionBench 0.1.
    """
    try:
        if "_target_" in config:
            instance = instantiate(config, _recursive_=config.get("_recursive_", False))
        else:
            instance = load_v01(config)
    except Exception as error:
        line = what_is_wrong(error, DictConfig({section: config}))
        if line is None:
            raise
        raise ValueError(line) from error
    for attribute in ("_fabric_instance", "_fabric"):  # the second is that of version 0.1
        if hasattr(instance, attribute):
            setattr(instance, attribute, fabric)
    return instance


def is_tracker(override: str) -> bool:
    """Tell whether an override names a tracker or sets an option of one, such as
    ``fabric/loggers=csv_logger``.
    """
    return key_of(override).replace("/", ".").split(".")[:2] == ["fabric", "loggers"]


def make_trackers(overrides: Sequence[str], folder: Path) -> list[Any]:
    """Make the trackers that the overrides name, with their files in ``folder``; refuse one named
    by Hydra.
    """
    if not any(is_tracker(override) for override in overrides):
        return []
    config = compose_run([*overrides, f"path.log_dir='{folder}'"]).fabric.loggers
    unresolved: Any = OmegaConf.to_container(config)
    for key, value in unresolved.items():
        # A comparison composes outside of a run of Hydra, where such a reference has no value.
        if "${hydra:" in str(value):
            raise ValueError(
                f"say fabric.loggers.{key}=NAME: a comparison has no name of its own for the "
                "tracker"
            )
    with composing():
        return [instantiate(config)]


# It is never closed: log handlers may keep it.
_nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


@contextmanager
def quiet() -> Iterator[None]:
    """Silence standard output and error, with their bar for every data set, and FusionBench's log
    except errors.
    """
    levels = {}
    for name in ("fusion_bench", "lightning.fabric"):
        logger = logging.getLogger(name)
        levels[logger] = logger.level
        logger.setLevel(logging.ERROR)
    try:
        with set_print_function_call(False), redirect_stdout(_nowhere), redirect_stderr(_nowhere):
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
