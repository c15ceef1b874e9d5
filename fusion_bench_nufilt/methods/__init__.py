"""The layer-wise methods, and their registry."""

from fusion_bench_nufilt.core.options import unknown

from .base import LayerMethod, Report, State, variant
from .best import Best
from .nufilt import Nufilt
from .spectral import Spectral
from .sums import Isotropic, Sum, WudiSums
from .tsv import TsvStream

ORDER_FREE = (Spectral, Sum, Isotropic, WudiSums, TsvStream, Best)
"""The methods that keep sums over the tasks, whose result does not depend on the tasks' order."""
VARIANTS = (
    variant(
        Nufilt,
        "nufilt/all_linear",
        target_modules="all-linear",
        other_params="mean",
        null_rank=0.3333,
    ),
    variant(Nufilt, "nufilt/naive", null_space=False, lora_rank=0),
    variant(Nufilt, "nufilt/filter_only", lora_rank=0),
    variant(Nufilt, "nufilt/adapter_only", null_space=False),
    variant(Nufilt, "nufilt/adapter_alone", null_space="zero"),
    variant(Nufilt, "nufilt/release", first_task="release"),
)
"""The same methods with other defaults; `config/method` says what each is for."""
METHODS: dict[str, type[LayerMethod]] = {
    method.name: method for method in (Nufilt, *ORDER_FREE, *VARIANTS)
}
"""The methods of `fusion_bench`, `nufilt merge` and `nufilt compare`, by name; plugins may add
their own.
"""


def find_method(name: str) -> type[LayerMethod]:
    """Return the method with a name, or raise a ValueError that says which one was probably
    meant.
    """
    if name not in METHODS:
        raise ValueError(unknown("layer-wise method", name, METHODS))
    return METHODS[name]


__all__ = [
    "METHODS",
    "ORDER_FREE",
    "LayerMethod",
    "Nufilt",
    "Report",
    "Spectral",
    "State",
    "find_method",
]
