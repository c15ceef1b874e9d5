"""What `fusion_bench` would compose from the same words, and the objects it would make of it."""

import difflib
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fusion_bench.constants
from fusion_bench.compat.method import load_algorithm_from_config
from fusion_bench.compat.modelpool import load_modelpool_from_config
from fusion_bench.compat.taskpool import load_taskpool_from_config
from fusion_bench.utils import import_object, instantiate
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from lightning import Fabric
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fusion_bench_nufilt.compare.overrides import key_value
from fusion_bench_nufilt.continual import ContinualMergingAlgorithm

PROGRAM = "fabric_model_fusion"
_GENERIC = ("batch", "stream")  # they run any of FusionBench's methods, and are none by themselves
NEED_DATA = {"sequential_finetuning": "training", "adamerging": "test", "lora_wemoe": "test"}
"""Methods that need more than models, and which data: the tasks' training data, or test data without labels."""


@contextmanager
def composing() -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise into a ValueError of one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(" ".join(str(error).split())) from None


def compose_run(overrides: Sequence[str]) -> DictConfig:
    """What `fusion_bench` composes from these overrides.

    Raises:
        ValueError: they can't be composed.
    """
    with composing(), _config_loader():
        return compose(PROGRAM, list(overrides))


@contextmanager
def _config_loader() -> Iterator[Any]:
    folder = Path(fusion_bench.constants.PROJECT_ROOT_PATH) / "fusion_bench_config"
    with initialize_config_dir(str(folder), version_base=None):
        yield GlobalHydra.instance().config_loader()


# --- methods by name ---


class Methods:
    """The method configs that `fusion_bench` would find.

    Args:
        overrides: of `fusion_bench`; only a ``hydra.searchpath`` among them matters.
    """

    def __init__(self, overrides: Sequence[str] = ()) -> None:
        self._searchpath = [override for override in overrides if override.startswith("hydra.searchpath")]

    def resolve(self, name: str) -> list[str]:
        """The overrides of `fusion_bench` that choose a method.

        Args:
            name: a continual method, with or without ``continual/``, or a method of FusionBench, which is run
                continually, see :class:`fusion_bench_nufilt.baselines.BatchMethodBaseline`.

        Raises:
            ValueError: no such method; the message lists what there is.
        """
        if name in self._names("continual"):
            return [f"method=continual/{name}"]
        folder, _, file = name.rpartition("/")
        if file not in self._names(folder):
            raise ValueError(self._unknown(name))
        target = self.compose([f"method={name}"]).get("_target_")
        made = import_object(target) if target else None
        if inspect.isclass(made) and issubclass(made, ContinualMergingAlgorithm):
            return [f"method={name}", *(self._own_settings(name) if folder == "nufilt" else ())]
        kind = "stream" if hasattr(made, "save_merged_model") else "batch"
        return [f"method=continual/{kind}", f"+method@method.base_method={name}"]

    def _own_settings(self, name: str) -> list[str]:
        """What makes a variant of NUFILT what it is: said again, so that overrides for all methods do not undo it."""
        default, variant = (plain(self.compose([f"method={method}"])) for method in ("nufilt", name))
        return [f"method.{key}={json.dumps(value)}" for key, value in variant.items() if value != default[key]]

    def place(self, overrides: Sequence[str], setting: str) -> str:
        """The override for ``KEY=VALUE``: of the method that was chosen, or else of FusionBench's that it runs."""
        config, (key, _) = self.compose(overrides), key_value(setting)
        inside = config.get("base_method") or {}
        return f"method.base_method.{setting}" if key not in config and key in inside else f"method.{setting}"

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """A method's configuration by itself."""
        return compose_run([*overrides, *self._searchpath]).method

    def all(self) -> list[str]:
        """NUFILT and the continual baselines that need no data."""
        return ["nufilt", *(name for name in self._names("continual") if name not in {*_GENERIC, *NEED_DATA})]

    def _names(self, folder: str, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
        group = f"method/{folder}" if folder else "method"
        with _config_loader() as loader:
            return list(loader.get_group_options(group, kind, PROGRAM, self._searchpath))

    def _tree(self, folder: str = "") -> Iterator[str]:
        prefix = f"{folder}/" if folder else ""
        yield from (prefix + name for name in self._names(folder))
        for group in self._names(folder, ObjectType.GROUP):
            yield from self._tree(prefix + group)

    def _unknown(self, name: str) -> str:
        there_is = list(self._tree())
        ours = [path for path in there_is if path.split("/")[0] in ("nufilt", "continual")]
        ours = [short for path in ours if (short := path.removeprefix("continual/")) not in _GENERIC]
        others = [path for path in there_is if path not in ours and not path.startswith("continual/")]
        close = difflib.get_close_matches(name, [*ours, *others], n=3)
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        return (
            f"there is no method '{name}'{hint}\ncontinual methods: {', '.join(sorted(ours))}"
            f"\nbatch methods of FusionBench, run continually: {', '.join(sorted(others))}"
        )


# --- objects ---


def taskpool_config(config: DictConfig) -> DictConfig:
    """The task pool of a run: the one named, or else the one that the model pool brings along.

    Raises:
        ValueError: there is none.
    """
    named = config.taskpool
    if not str(named.get("_target_", "")).endswith("DummyTaskPool"):
        return named
    if (bundled := config.modelpool.get("taskpool")) is None:
        raise ValueError("the model pool brings no task pool, and nothing can be scored: add taskpool=NAME")
    return bundled


def make_fabric(config: DictConfig) -> Fabric:
    """One device, and no logger: runs that share it write no files of their own."""
    return Fabric(accelerator=config.accelerator, precision=config.precision, devices=1)


def make_modelpool(config: DictConfig, fabric: Fabric) -> Any:
    """The model pool of a composed run."""
    return _make(config.modelpool, fabric, load_modelpool_from_config)


def make_taskpool(config: DictConfig, fabric: Fabric) -> Any:
    """The task pool of a composed run, see :func:`taskpool_config`."""
    return _make(taskpool_config(config), fabric, load_taskpool_from_config)


def make_method(config: DictConfig, fabric: Fabric) -> Any:
    """A method, from its part of a composed run."""
    return _make(config, fabric, load_algorithm_from_config)


def plain(config: DictConfig) -> Any:
    """The resolved values, as JSON gives them back."""
    with composing():
        return json.loads(json.dumps(OmegaConf.to_container(config, resolve=True, throw_on_missing=True), default=str))


def _make(config: DictConfig, fabric: Fabric, load_v01: Callable[[DictConfig], Any]) -> Any:
    """As FusionBench's program does it; a config without ``_target_`` is of FusionBench 0.1."""
    if "_target_" in config:
        made = instantiate(config, _recursive_=config.get("_recursive_", False))
    else:
        made = load_v01(config)
    for attribute in ("_fabric_instance", "_fabric"):  # the second is the 0.1 kind's
        if hasattr(made, attribute):
            setattr(made, attribute, fabric)
    return made
