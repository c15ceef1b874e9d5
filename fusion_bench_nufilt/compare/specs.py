"""Read the methods and seeds of a comparison from the words of the command line."""

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fusion_bench.utils import import_object
from hydra.core.object_type import ObjectType
from omegaconf import DictConfig

from fusion_bench_nufilt.continual import ContinualMergingAlgorithm
from fusion_bench_nufilt.methods import METHODS, ORDER_FREE
from fusion_bench_nufilt.pages.content import SINGLE_MODELS
from fusion_bench_nufilt.utils.files import file_name, printable
from fusion_bench_nufilt.utils.options import unknown

from .configs import PROGRAM, compose_run, config_loader, plain
from .overrides import key_value

_GENERIC = (
    "batch",
    "stream",
)  # they run any of FusionBench's methods, and are not methods themselves
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
    preset: bool = (
        False  # whether it comes from a preset, whose ranks are scaled to the models' width
    )


def parse_methods(text: str, overrides: Sequence[str] = ()) -> list[RunSpec]:
    """Read ``[LABEL=]NAME[:KEY=VALUE]…, …``; ``all`` and ``order_free`` stand for many.

    >>> words = "nufilt, NUFILT small=nufilt:null_rank=21:lora_rank=10"
    >>> [spec.label for spec in parse_methods(words)]
    ['nufilt', 'NUFILT small']
    """
    methods, specs = _MethodConfigs(overrides), []
    for part in _split(text, ","):
        for row in methods.group(part) or [part]:
            head, *settings = _split(row, ":")
            label, _, name = (word.strip() for word in head.rpartition("="))
            chosen = methods.resolve(name := name.removeprefix("continual/"))
            own = (methods.override(chosen, setting) for setting in settings)
            specs.append(RunSpec(printable(label or row), (*chosen, *own), name, tuple(settings)))
    return specs


def _split(text: str, separator: str) -> list[str]:
    """Split a text at separators that are not inside brackets, strip the parts, and drop empty
    ones.
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


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
        first, end = int(match[1]), int(match[2] or int(match[1]) + 1)
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

    def resolve(self, name: str) -> list[str]:
        """Return the overrides that choose a continual method, or that run one of FusionBench's own
        continually.
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
        """Return what defines a variant of NUFILT, so that overrides for all methods do not undo
        it.
        """
        default, variant = (
            plain(self.compose([f"method={method}"])) for method in ("nufilt", name)
        )
        return [
            f"method.{key}={json.dumps(value)}"
            for key, value in variant.items()
            if value != default[key]
        ]

    def override(self, overrides: Sequence[str], setting: str) -> str:
        """Return the override for ``KEY=VALUE``, which may be an option of the method that the
        chosen one runs.
        """
        config, (key, _) = self.compose(overrides), key_value(setting)
        inside = config.get("base_method") or {}
        if key.split(".")[0] not in (known := {*config, *inside}):
            raise ValueError(f"'{setting}': {unknown('option', key, known)}")
        group = "method.base_method" if key in inside and key not in config else "method"
        return f"{group}.{setting}"

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        return compose_run([*overrides, *self._searchpath]).method

    def group(self, word: str) -> list[str]:
        """Return the methods that ``all`` (without those that need data) or ``order_free`` stands
        for, else none.
        """
        if word == "order_free":
            return [method.name for method in ORDER_FREE]
        if word != "all":
            return []
        ours = [name for name in METHODS if not name.startswith("nufilt/")]
        return ours + [
            name for name in self._names("continual") if name not in {*_GENERIC, *NEED_DATA}
        ]

    def _names(self, folder: str, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
        with config_loader() as loader:
            return list(
                loader.get_group_options(
                    f"method/{folder}".rstrip("/"), kind, PROGRAM, self._searchpath
                )
            )

    def _tree(self, folder: str = "") -> Iterator[str]:
        prefix = f"{folder}/" if folder else ""
        yield from (prefix + name for name in self._names(folder))
        for group in self._names(folder, ObjectType.GROUP):
            yield from self._tree(prefix + group)

    def _unknown(self, name: str) -> str:
        ours = {*METHODS, *self._names("continual")} - {*_GENERIC}
        others = {path for path in self._tree() if not path.startswith("continual/")} - ours
        lists = f"continual methods: {', '.join(sorted(ours))}\n"
        lists += f"batch methods of FusionBench, run continually: {', '.join(sorted(others))}"
        return unknown("method", name, ours | others, lists)
