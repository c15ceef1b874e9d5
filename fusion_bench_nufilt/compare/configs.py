"""The configuration that `fusion_bench` would compose from the same words, and the objects that it would make of it."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fusion_bench.constants
from fusion_bench.compat.method import load_algorithm_from_config
from fusion_bench.compat.modelpool import load_modelpool_from_config
from fusion_bench.compat.taskpool import load_taskpool_from_config
from fusion_bench.utils import instantiate
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from lightning import Fabric
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

PROGRAM = "fabric_model_fusion"


@contextmanager
def composing() -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise into a ValueError of one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(" ".join(str(error).split())) from None


def compose_run(overrides: Sequence[str]) -> DictConfig:
    """Return what `fusion_bench` composes from overrides.

    Raises:
        ValueError: they can't be composed.
    """
    with composing(), config_loader():
        return compose(PROGRAM, list(overrides))


@contextmanager
def config_loader() -> Iterator[Any]:
    """Give Hydra's loader of the configs that `fusion_bench` finds."""
    folder = Path(fusion_bench.constants.PROJECT_ROOT_PATH) / "fusion_bench_config"
    with initialize_config_dir(str(folder), version_base=None):
        yield GlobalHydra.instance().config_loader()


def taskpool_config(config: DictConfig) -> DictConfig:
    """Return the task pool of a run: the one that is named, or else the one that the model pool brings along.

    Raises:
        ValueError: there is neither.
    """
    named = config.taskpool
    if not str(named.get("_target_", "")).endswith("DummyTaskPool"):
        return named
    if (bundled := config.modelpool.get("taskpool")) is None:
        raise ValueError("the model pool brings no task pool, and nothing can be scored: add taskpool=NAME")
    return bundled


def make_fabric(config: DictConfig) -> Fabric:
    """Make a Fabric with one device and no logger, so that runs that share it write no files of their own."""
    return Fabric(accelerator=config.accelerator, precision=config.precision, devices=1)


def make_modelpool(config: DictConfig, fabric: Fabric) -> Any:
    """Make the model pool of a composed run."""
    return _make(config.modelpool, fabric, load_modelpool_from_config)


def make_taskpool(config: DictConfig, fabric: Fabric) -> Any:
    """Make the task pool of a composed run, see :func:`taskpool_config`."""
    return _make(taskpool_config(config), fabric, load_taskpool_from_config)


def make_method(config: DictConfig, fabric: Fabric) -> Any:
    """Make a method from its part of a composed run."""
    return _make(config, fabric, load_algorithm_from_config)


def plain(config: DictConfig) -> Any:
    """Return the resolved values as JSON gives them back."""
    with composing():
        return json.loads(json.dumps(OmegaConf.to_container(config, resolve=True, throw_on_missing=True), default=str))


def _make(config: DictConfig, fabric: Fabric, load_v01: Callable[[DictConfig], Any]) -> Any:
    """Make an object as FusionBench's program does; a config without ``_target_`` is of FusionBench 0.1."""
    if "_target_" in config:
        made = instantiate(config, _recursive_=config.get("_recursive_", False))
    else:
        made = load_v01(config)
    for attribute in ("_fabric_instance", "_fabric"):  # the second is the 0.1 kind's
        if hasattr(made, attribute):
            setattr(made, attribute, fabric)
    return made
