"""The registry of the layer-wise methods."""

from fusion_bench_nufilt.utils.options import unknown

from .base import LayerMethod, variant
from .nufilt import Nufilt
from .options import VARIANTS
from .order_free import Isotropic, Sum, WudiSums
from .spectral import Best, Spectral, TsvStream

ORDER_FREE = (Spectral, Sum, Isotropic, WudiSums, TsvStream, Best)
"""The methods that keep sums over the tasks, whose result does not depend on the tasks' order."""
METHODS: dict[str, type[LayerMethod]] = {method.name: method for method in (Nufilt, *ORDER_FREE)}
"""The methods of `fusion_bench`, `nufilt merge` and `nufilt compare`, by name; plugins may add
their own.
"""

for _name, _defaults in VARIANTS.items():
    METHODS[_name] = variant(Nufilt, _name, **_defaults)


def find_method(name: str) -> type[LayerMethod]:
    """Return the method with a name, or raise a ValueError that says which one was probably
    meant.
    """
    if name not in METHODS:
        raise ValueError(unknown("layer-wise method", name, METHODS))
    return METHODS[name]
