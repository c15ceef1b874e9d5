"""Read the methods and seeds of a comparison from the words of the command line."""

import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fusion_bench.utils import import_object
from omegaconf import DictConfig

from fusion_bench_nufilt.continual import ContinualMergingAlgorithm
from fusion_bench_nufilt.methods.options import ORDER_FREE
from fusion_bench_nufilt.methods.registry import METHODS
from fusion_bench_nufilt.pages.content import SINGLE_MODELS
from fusion_bench_nufilt.utils.files import file_name, printable
from fusion_bench_nufilt.utils.options import unknown
from fusion_bench_nufilt.utils.overrides import key_value, names_in

from .configs import compose_run, config_folders, plain

#: They run any of FusionBench's methods, and are not methods themselves.
_GENERIC = ("batch", "stream")
_MOST_SEEDS = 1000
#: Methods that need data besides models: training data of the tasks, or a few unlabelled items.
NEED_DATA = {
    "sequential_finetuning": "training",
    "adamerging": "unlabelled",
    "lora_wemoe": "unlabelled",
}


@dataclass(frozen=True)
class RunSpec:
    """A method with its settings, which is one row of the comparison."""

    label: str  # its name in tables and pictures
    overrides: tuple[str, ...]  # the overrides of `fusion_bench` that are this row's own
    method: str  # its name, without ``continual/``
    settings: tuple[str, ...] = ()  # the ``KEY=VALUE`` words among the overrides


def parse_methods(text: str, overrides: Sequence[str] = ()) -> list[RunSpec]:
    """Read ``[LABEL=]NAME[:KEY=VALUE]…, …``; ``all`` and ``order_free`` stand for many.

    Examples:
        >>> words = "nufilt, NUFILT small=nufilt:null_rank=21:lora_rank=10"
        >>> [spec.label for spec in parse_methods(words)]
        ['nufilt', 'NUFILT small']
    """
    methods = _MethodConfigs(overrides)
    specs = []
    for part in _split(text, ","):
        for words in methods.group(part) or [part]:
            head, *settings = _split(words, ":")
            label, _, name = head.rpartition("=")
            label = label.strip() or words
            name = name.strip().removeprefix("continual/")
            chosen = methods.resolve(name)
            changed = [methods.override(chosen, setting) for setting in settings]
            specs.append(RunSpec(printable(label), (*chosen, *changed), name, tuple(settings)))
    return specs


def _split(text: str, separator: str) -> list[str]:
    """Split a text at separators that are not inside brackets, strip the parts, and drop empty
    ones.
    """
    words = [""]
    depth = 0
    for letter in text:
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        if letter == separator and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return [part.strip() for part in words if part.strip()]


def check_specs(specs: Sequence[RunSpec]) -> None:
    if not specs:
        raise ValueError("there is no method to compare: choose some with --methods or --preset")
    by_file: dict[str, RunSpec] = {}
    for spec in specs:
        if spec.label in SINGLE_MODELS:
            raise ValueError(
                f"'{spec.label}' stands for single models in the tables: choose another label, "
                f"LABEL={spec.method}"
            )
        # Labels that differ may be one folder's name, and would read each other's runs.
        other = by_file.setdefault(file_name(spec.label), spec)
        if other is not spec:
            raise ValueError(
                f"methods '{other.label}' and '{spec.label}' need labels to tell them apart: "
                "LABEL=METHOD"
            )


def parse_seeds(text: str) -> list[int]:
    """Read seeds as numbers and half-open ranges: ``42``, ``42,45`` or ``42:52`` (42 to 51, the
    paper's ten orders).
    """
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?::(\d{1,10}))?\s*", part)
        if not match:
            raise ValueError(f"seeds must be like 42, 42,45 or 42:52, got '{text}'")
        first = int(match[1])
        end = int(match[2]) if match[2] else first + 1
        if end <= first:
            raise ValueError(f"seeds '{part}': the range is empty; its end is not part of it")
        if end - first > _MOST_SEEDS:
            raise ValueError(
                f"seeds '{part}' are {end - first}, more than the {_MOST_SEEDS} of a comparison"
            )
        seeds += range(first, end)
    return list(dict.fromkeys(seeds))


class _MethodConfigs:
    """The method configs that `fusion_bench` would find; of the overrides, only
    ``hydra.searchpath`` matters.
    """

    def __init__(self, overrides: Sequence[str] = ()) -> None:
        self._searchpath = [
            override for override in overrides if override.startswith("hydra.searchpath")
        ]
        with config_folders(self._searchpath) as folders:
            self._names = sorted(names_in("method", folders))

    def resolve(self, name: str) -> list[str]:
        """Return the overrides that choose a continual method, or that run one of FusionBench's own
        continually.
        """
        if f"continual/{name}" in self._names:
            return [f"method=continual/{name}"]
        if name not in self._names:
            raise ValueError(self._unknown(name))
        target = self.compose([f"method={name}"]).get("_target_")
        method = import_object(target) if target else None
        if inspect.isclass(method) and issubclass(method, ContinualMergingAlgorithm):
            overrides = [f"method={name}"]
            if name.startswith("nufilt/"):
                overrides += self._variant_settings(name)
            return overrides
        # A continual method of FusionBench hands its steps to this function.
        kind = "stream" if hasattr(method, "save_merged_model") else "batch"
        return [f"method=continual/{kind}", f"+method@method.base_method={name}"]

    def _variant_settings(self, name: str) -> list[str]:
        """Return what defines a variant of NUFILT, so that overrides for all methods do not undo
        it.
        """
        default = plain(self.compose(["method=nufilt"]))
        variant = plain(self.compose([f"method={name}"]))
        settings = []
        for key, value in variant.items():
            if value != default[key]:
                settings.append(f"method.{key}={json.dumps(value)}")
        return settings

    def override(self, overrides: Sequence[str], setting: str) -> str:
        """Return the override for ``KEY=VALUE``, which may be an option of the method that the
        chosen one runs.
        """
        key, _ = key_value(setting)
        config = self.compose(overrides)
        base_method = config.get("base_method") or {}
        options = {*config, *base_method}
        if key.split(".")[0] not in options:
            raise ValueError(f"'{setting}': {unknown('option', key, options)}")
        if key in base_method and key not in config:
            return f"method.base_method.{setting}"
        return f"method.{setting}"

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        return compose_run([*overrides, *self._searchpath]).method

    def group(self, word: str) -> Sequence[str]:
        """Return the methods that ``all`` (without those that need data) or ``order_free`` stands
        for, else none.
        """
        if word == "order_free":
            return ORDER_FREE
        if word != "all":
            return []
        names = [name for name in METHODS if not name.startswith("nufilt/")]
        return [*names, *(name for name in self._continual_methods() if name not in NEED_DATA)]

    def _continual_methods(self) -> list[str]:
        """Return the names of the methods in ``method/continual``."""
        names = []
        for path in self._names:
            folder, _, name = path.partition("/")
            if folder == "continual" and name not in _GENERIC:
                names.append(name)
        return names

    def _unknown(self, name: str) -> str:
        if name in METHODS:  # one of another package
            return f"method '{name}' needs --config-dir, the folder in which method/{name}.yaml is"
        of_fusion_bench = {path for path in self._names if not path.startswith("continual/")}
        return unknown("method", name, of_fusion_bench | {*METHODS, *self._continual_methods()})
