"""The layer-wise methods, and their registry."""

from .base import LayerMethod, Report, State
from .nufilt import Nufilt
from .spectral import Spectral
from .sums import Isotropic, Mix, Sum, Sylvester, TsvStream, WudiSums

ORDER_FREE = (Spectral, Sum, Isotropic, WudiSums, TsvStream, Sylvester, Mix)
"""The methods that keep sums over the tasks, whose result does not depend on the tasks' order."""
METHODS: dict[str, type[LayerMethod]] = {method.name: method for method in (Nufilt, *ORDER_FREE)}
"""The methods that `fusion_bench` and `nufilt merge` run, by name; plugins may add their own."""


def find_method(name: str) -> type[LayerMethod]:
    """Return the method with a name, or raise a ValueError that lists the known ones."""
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
    return METHODS[name]


__all__ = ["METHODS", "ORDER_FREE", "LayerMethod", "Nufilt", "Report", "Spectral", "State", "find_method"]
