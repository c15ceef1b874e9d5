"""The options of every method, and its defaults, without torch: help is there at once."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from fusion_bench_nufilt.nufilt.config import FusionConfig
from fusion_bench_nufilt.utils import options
from fusion_bench_nufilt.utils.options import check_positive, is_number

RTOL = 1e-6  # a direction weaker than this share of the strongest is rounding error

option = partial(options.option, panel="Order-free methods")


@dataclass(frozen=True)
class RampConfig:
    """The setting that all order-free methods have; any others must be numbers above zero.

    Raises:
        ValueError: a value is out of its range; the message names the key.
    """

    ramp: float = option(
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

    scale: float = option(1.0, "Strength of the merged update.", symbol="λ")


@dataclass(frozen=True)
class SumConfig(ScaleConfig):
    """The settings of task arithmetic on the running sum."""

    scale: float = option(0.3, "Strength of the merged update.", symbol="λ")


@dataclass(frozen=True)
class WudiConfig(ScaleConfig):
    """The settings of WUDI in closed form."""

    eps: float = option(
        0.1,
        "Ridge of the least-squares problem, over the mean eigenvalue of its matrix.",
        symbol="ε",
    )


@dataclass(frozen=True)
class TsvConfig(ScaleConfig):
    """The settings of TSV-M."""

    keep: float = option(
        1.0,
        "A task keeps at most this share of a layer's directions; below 1, they are found by two "
        "rounds of subspace iteration.",
    )
    faintest: float = option(
        RTOL, "Directions below this share of a task's strongest are left out."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep > 1:
            raise ValueError(f"keep must be at most 1, got {self.keep!r}")


@dataclass(frozen=True)
class SpectralConfig(RampConfig):
    """The settings of spectral voting."""

    kappa: float = option(
        0.9, "Strength of a direction, over the tasks' mean largest singular value.", symbol="κ"
    )
    damp: float = option(0.5, "Directions that n tasks share are held down by n^-damp.")
    faintest: float = option(
        RTOL,
        "Votes below this share of the strongest are left out; from 1e-4 on, votes are computed in "
        "float32, of the leading eighth of the directions where no others count.",
    )


#: The class of the options of each method, by the method's name.
OPTIONS: dict[str, type] = {
    "nufilt": FusionConfig,
    "spectral": SpectralConfig,
    "sum": SumConfig,
    "isotropic": ScaleConfig,
    "wudi_sums": WudiConfig,
    "tsv_stream": TsvConfig,
    "best": ScaleConfig,
}

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

#: What each method sets otherwise than its options, and what is merged, do by default.
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "nufilt": {},
    "spectral": ORDER_FREE_DEFAULTS,
    "sum": ORDER_FREE_DEFAULTS,
    "isotropic": ORDER_FREE_DEFAULTS,
    "wudi_sums": ORDER_FREE_DEFAULTS,
    "tsv_stream": ORDER_FREE_DEFAULTS,
    "best": {**ORDER_FREE_DEFAULTS, "ramp": 0.4},
    **VARIANTS,
}
