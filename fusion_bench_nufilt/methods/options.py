"""All options but NUFILT's own, which are in ``nufilt/options.py``: of the other methods, with the
defaults of every method; of the layers that are merged; of a merge of folders; of a run, and of the
devices that it uses.

Nothing here imports torch before it is used: help is there at once.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fusion_bench_nufilt.nufilt.options import FusionConfig
from fusion_bench_nufilt.utils.options import (
    check_choices,
    check_positive,
    check_seed,
    check_whole,
    is_number,
    option,
)

if TYPE_CHECKING:
    import torch

# By the heading above them in help and in the documentation.
_order_free_option = partial(option, panel="Order-free methods")
_layer_option = partial(option, panel="Layers")
_file_option = partial(option, panel="Files")
_machine_option = partial(option, panel="Machine")
_protocol_option = partial(option, panel="Protocol")


@dataclass(frozen=True)
class RampConfig:
    """The setting that all order-free methods have; any others must be numbers above zero.

    Raises:
        ValueError: a value is out of its range; the message names the key.
    """

    ramp: float = _order_free_option(
        0.0,
        "Strength grows with depth, from λ (1 - ramp) in the first block to λ (1 + ramp) in the "
        "last.",
    )

    def __post_init__(self) -> None:
        numbers = [field.name for field in fields(self) if field.type is float]
        numbers.remove("ramp")
        check_positive(self, *numbers)
        if not (is_number(self.ramp) and -1 < self.ramp < 1):
            raise ValueError(f"ramp must be a number between -1 and 1, got {self.ramp!r}")


@dataclass(frozen=True)
class ScaleConfig(RampConfig):
    """The settings of an order-free method whose update has a strength."""

    scale: float = _order_free_option(1.0, "Strength of the merged update.", symbol="λ")


@dataclass(frozen=True)
class SpectralConfig(RampConfig):
    """The settings of spectral voting."""

    kappa: float = _order_free_option(
        0.9, "Strength of a direction, over the tasks' mean largest singular value.", symbol="κ"
    )
    damp: float = _order_free_option(0.5, "Directions that n tasks share are held down by n^-damp.")


#: Other defaults of NUFILT, by name; `config/method` says what each is for.
VARIANTS: dict[str, dict[str, Any]] = {
    "nufilt/all_linear": {
        "target_modules": "all-linear",
        "other_params": "mean",
        "null_rank": 0.3333,
    },
    "nufilt/naive": {"null_space": False, "lora_rank": 0},
    "nufilt/filter_only": {"lora_rank": 0},
    "nufilt/adapter_only": {"null_space": False},
    "nufilt/adapter_alone": {"null_space": "zero"},
    "nufilt/release": {"first_task": "release"},
}

#: Of a method that keeps sums.
ORDER_FREE_DEFAULTS: dict[str, Any] = {"target_modules": "all-linear", "other_params": "mean"}


class MethodEntry(NamedTuple):
    """What is known of a method before its class is imported, which takes torch."""

    module: str  # of this package
    class_name: str
    Options: type
    #: What it sets otherwise than its options, and what is merged, do by default.
    defaults: Mapping[str, Any]


#: The methods of this package, by the names that users give. Their classes, their options on the
#: command line and its help are made of this table.
METHOD_TABLE: dict[str, MethodEntry] = {
    "nufilt": MethodEntry("nufilt", "Nufilt", FusionConfig, {}),
    "spectral": MethodEntry("spectral", "Spectral", SpectralConfig, ORDER_FREE_DEFAULTS),
    "sum": MethodEntry("order_free", "Sum", ScaleConfig, {**ORDER_FREE_DEFAULTS, "scale": 0.3}),
    "tsv_stream": MethodEntry("spectral", "TsvStream", ScaleConfig, ORDER_FREE_DEFAULTS),
    "best": MethodEntry("spectral", "Best", ScaleConfig, {**ORDER_FREE_DEFAULTS, "ramp": 0.4}),
}
for _name, _defaults in VARIANTS.items():
    METHOD_TABLE[_name] = METHOD_TABLE["nufilt"]._replace(defaults=_defaults)

#: Those of them that keep sums over the tasks, whose result does not depend on the tasks' order.
ORDER_FREE = tuple(
    name for name, entry in METHOD_TABLE.items() if issubclass(entry.Options, RampConfig)
)


OtherParams = Literal["pretrained", "first", "mean"]


@dataclass(frozen=True)
class TargetConfig:
    """Which layers are merged, and what happens to all other parameters; a ValueError names a bad
    key.
    """

    target_modules: str | Sequence[str] = _layer_option(
        "auto",
        "What is merged. auto: the authors' layers of CLIP (attention and fc1) and T5 (attention "
        "and feed-forward), and all projections in the blocks of other models. all-linear: every "
        "linear layer but the output head. A list has names of modules, whole or from a dot on; a "
        "string is a regular expression for the whole name.",
    )
    exclude_modules: str | Sequence[str] | None = _layer_option(
        None, "What is left out, named in the same way."
    )
    other_params: OtherParams = _layer_option(
        "pretrained",
        "Every other parameter: the pretrained model's (the authors' way), the first task's, or "
        "the tasks' mean.",
    )
    heads: str = _layer_option(
        "auto",
        "Classifiers' heads, kept for each task. auto: those with other labels, or that the "
        "pretrained model lacks; none: no heads; anything else is a regular expression for the "
        "modules' names.",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        _check_patterns("target_modules", self.target_modules)
        _check_patterns("heads", self.heads)
        if self.exclude_modules is not None:
            _check_patterns("exclude_modules", self.exclude_modules)

    def changes_other_params(self, step: int) -> bool:
        """Return whether the task of a step (from 1) changes the parameters outside the merged
        layers.
        """
        return self.other_params == "mean" or (self.other_params == "first" and step == 1)


def _check_patterns(key: str, value: object) -> None:
    """Raise a ValueError unless a pattern is one regular expression or a list of words, none of
    them empty.
    """
    patterns = [value] if isinstance(value, str) else value
    is_valid = False
    if isinstance(patterns, Sequence) and len(patterns) > 0:
        is_valid = all(isinstance(pattern, str) and pattern for pattern in patterns)
    if not is_valid:
        raise ValueError(f"{key} must be a string or a list of strings, none empty, got {value!r}")
    if isinstance(value, str):
        matches(value, "", of=key)  # raises if it is not a regular expression


def matches(pattern: str, name: str, *, of: str) -> bool:
    """Tell whether an expression matches the whole of a name.

    Raises:
        ValueError: the pattern is no regular expression; the message names ``of``, its option.
    """
    try:
        return re.fullmatch(pattern, name) is not None
    # Deep nesting and huge counts of repeats raise other errors than re's own.
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{of}: {pattern!r} is no regular expression: {error}") from error


@dataclass(frozen=True)
class Settings:
    """How folders are merged, apart from the method's options; a ValueError for a value out of its
    range.
    """

    seed: int = option(42, "Seed of the adapters' initialisation.")
    weights: Sequence[float] | None = option(
        None,
        "Strength of each task's update, in the order of the tasks; 1 by default.",
        scope="tasks",
    )
    tokenizer: str | None = _layer_option(
        None,
        "Whose tokens the result has: base, union (the default) or the name of a task.",
        scope="merge",
    )
    step: int | None = _machine_option(
        None,
        "Number of the first task in the stream, from 1; by default, as the manifest says.",
        scope="run",
    )
    state: bool | None = _file_option(
        None,
        "Keep beside the model what the next merge needs: the sums of order-free methods (the "
        "default), and in float32 what 16 bits round.",
        scope="merge",
    )
    adapter: bool = _file_option(
        False,
        "Merge adapters into an adapter, without the weights of their base.",
        scope="merge",
    )
    rank: int | None = _file_option(
        None,
        "The highest rank of an adapter's layers, each cut to its best approximation. By default, "
        "nothing is cut.",
        scope="merge",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = _file_option(
        "auto",
        "Type of the result: auto is the base's, with FP8 as bfloat16, and float32 for an adapter.",
    )
    device: str = _machine_option(
        "cpu",
        "Where to compute: cpu, or cuda, or several such as cuda:0,cuda:1.",
        scope="run",
    )
    verify: bool = _machine_option(
        True,
        "Check that earlier results are unchanged and from this base, and refuse models of another "
        "type than the base.",
        scope="run",
    )
    max_memory: int | None = _machine_option(
        None, "The most memory to use, such as 4GB, with fewer layers at a time.", scope="run"
    )
    engine: Literal["local", "ray"] = _machine_option(
        "local",
        "What computes: this process, or workers on every node or GPU of a Ray cluster.",
        scope="run",
    )
    address: str | None = _machine_option(
        None,
        "Address of the Ray cluster, such as 10.0.0.1:6379; by default this machine's.",
        scope="run",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_seed(self.seed)
        if self.weights is not None:
            is_list = isinstance(self.weights, list | tuple) and len(self.weights) > 0
            if not is_list or not all(map(is_number, self.weights)):
                raise ValueError(f"weights must be a list of numbers, got {self.weights!r}")
        if self.step is not None:
            check_whole(self, "step", most=10**6)
        self._check_adapter()
        if self.state is not None and not isinstance(self.state, bool):
            raise ValueError(f"state must be true or false, got {self.state!r}")
        if self.max_memory is not None:
            check_whole(self, "max_memory", most=2**62)
        if self.engine == "local":  # a cluster's workers choose their own devices
            from fusion_bench_nufilt.utils.devices import check_devices

            check_devices(self.device)
            if self.address is not None:
                raise ValueError(f"address '{self.address}' is for engine=ray")
        elif self.device not in ("cpu", "cuda"):
            raise ValueError(
                f"device '{self.device}': engine=ray gives every worker a GPU by itself; say cuda, "
                "or cpu"
            )

    def _check_adapter(self) -> None:
        if self.rank is not None:
            check_whole(self, "rank")
        if self.adapter:
            if self.tokenizer is not None:
                raise ValueError("tokenizer is for a model, and the result is an adapter")
        elif self.rank is not None:
            raise ValueError(f"rank {self.rank} is for an adapter: add adapter=true (--adapter)")

    def first_step(self, merged_manifest: Mapping[str, Any]) -> int:
        """Return the number of the first task in the stream, from 1, given the manifest of the
        model to merge into, which is empty if there is none.
        """
        return self.step or merged_manifest.get("step", 0) + 1

    def coefficients(self, num_tasks: int) -> Sequence[float]:
        """Return what the update of each task is multiplied by."""
        if self.weights is None:
            return [1.0] * num_tasks
        if len(self.weights) != num_tasks:
            raise ValueError(f"there are {len(self.weights)} weights for {num_tasks} tasks")
        return self.weights

    @property
    def devices(self) -> list["torch.device"]:
        import torch

        return [torch.device(name) for name in self.device.split(",")]

    @property
    def on_cpu(self) -> bool:
        return self.devices[0].type == "cpu"


Evaluate = Literal["last", "diagonal", "every_step", "every_step_all"]


@dataclass(frozen=True)
class ProtocolConfig:
    """How a stream of models is merged, scored and saved by any method; a ValueError names a bad
    key.
    """

    shuffle_order: bool = _protocol_option(
        True,
        "Shuffle the pool's order by random.Random(seed).shuffle(names); seeds 42 to 51 give the "
        "paper's orders.",
    )
    #: The order of a run is compared by itself.
    seed: int = _protocol_option(42, "Seed of the order and of everything drawn.")
    evaluate: Evaluate = _protocol_option(
        "diagonal",
        "What is scored. last: the final model. diagonal: also each task right after its step, "
        "which BWT needs. every_step: all tasks so far at every step. every_step_all: also those "
        "to come, which the zero-shot score needs.",
    )
    save_on_every_step: bool = _protocol_option(
        True,
        "Keep the model after each step; checkpoints/merged_model_0 is that after step 1.",
        scope="run",
    )
    check_models: bool = _protocol_option(
        True, "Load every model before the first step.", scope="run"
    )
    num_merged: int | None = _protocol_option(
        None, "Number of models in the pool's _merged_ model; null: as its manifest says."
    )
    verify: bool = _protocol_option(
        True,
        "Check by digests that the pool's _merged_ model is as it was saved and comes from its "
        "_pretrained_; refuse models of another type, merged already, or twice in the pool.",
        scope="run",
    )

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_choices(self)
        if self.num_merged is not None:
            check_whole(self, "num_merged")


_warn_once = cache(logging.getLogger(__name__).warning)


@dataclass(frozen=True)
class DeviceConfig:
    """Where layers are computed; a ValueError unless it is null, all or a list of numbers."""

    devices: Literal["all"] | Sequence[int] | None = _machine_option(
        None,
        "GPUs that share the layers: all, or a list of their numbers; null: the one that the run "
        "is on.",
        scope="run",
    )

    def __post_init__(self) -> None:
        numbers = self.devices
        if numbers is None or numbers == "all":
            return
        is_list = isinstance(numbers, list | tuple) and len(numbers) > 0
        # The type is compared, since True is an int.
        if not is_list or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(
                f"devices must be all, or a list of numbers of GPUs such as [0,1], got {numbers!r}"
            )

    def choose(self, otherwise: "torch.device") -> list["torch.device"]:
        """Return the devices, by default ``otherwise``, or the CPU in place of a Mac's GPU; no GPUs
        is a ValueError.
        """
        import torch

        if self.devices is None:
            if otherwise.type in ("cpu", "cuda"):
                return [otherwise]
            _warn_once(
                "layers are computed on the CPU: PyTorch has no eigenvalue solver for %s",
                otherwise.type,
            )
            return [torch.device("cpu")]
        numbers = self.devices
        if numbers == "all":
            numbers = range(torch.cuda.device_count())
        if not numbers:
            raise ValueError("devices=all: PyTorch sees no GPU; leave devices out")
        return [torch.device("cuda", int(number)) for number in numbers]
