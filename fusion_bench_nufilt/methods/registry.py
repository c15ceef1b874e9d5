"""The registry of the layer-wise methods, to which other packages add their own."""

import logging
from collections import UserDict
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fusion_bench_nufilt.utils.options import unknown

from .base import LayerMethod
from .options import METHOD_TABLE, MethodEntry

log = logging.getLogger(__name__)

#: The entry points by which another package adds a subclass of LayerMethod each.
GROUP = "fusion_bench_nufilt.methods"


class _Methods(UserDict[str, Any]):
    """Methods by name; one of this package is an entry of the table until it is asked for, so that
    a merge imports its own method alone.
    """

    def __getitem__(self, name: str) -> type[LayerMethod]:
        method = super().__getitem__(name)
        if isinstance(method, MethodEntry):
            method = _class_of(name, method)
            self.data[name] = method
        return method

    def option_kinds(self) -> list[type]:
        """Return the dataclasses of all methods' options, each once."""
        return list(dict.fromkeys(method.Options for method in self.data.values()))


def _class_of(name: str, entry: MethodEntry) -> type[LayerMethod]:
    """Return the method of an entry of the table: its class, or that with other defaults."""
    module = import_module(f"{__package__}.{entry.module}")
    method: type[LayerMethod] = getattr(module, entry.class_name)
    if method.name == name:
        return method
    defaults = {**method.defaults, **entry.defaults}
    return type(name, (method,), {"name": name, "defaults": defaults})


METHODS = _Methods(METHOD_TABLE)
"""The methods of `fusion_bench`, `nufilt merge` and `nufilt compare`, by name."""


def find_method(name: str) -> type[LayerMethod]:
    """Return the method with a name, or raise a ValueError that says which one was probably
    meant.
    """
    if name not in METHODS:
        raise ValueError(unknown("layer-wise method", name, METHODS))
    return METHODS[name]


def _add_plugins() -> None:
    """Add the methods that other packages have.

    One that can't be imported is a warning, since a command that does not ask for it works without
    it; a ValueError names one that can't be added.
    """
    for entry_point in entry_points(group=GROUP):
        label = f"the method '{entry_point.name}' of the package '{_package_of(entry_point)}'"
        try:
            method = entry_point.load()
        except Exception as error:  # whatever a package of others raises when it is imported
            log.warning("%s is left out: it can't be imported: %s", label, error)
            continue
        if not (isinstance(method, type) and issubclass(method, LayerMethod)):
            raise ValueError(f"{label} is no subclass of LayerMethod: {entry_point.value}")
        if method.name != entry_point.name:
            raise ValueError(f"{label} calls itself '{method.name}': give both one name")
        if METHODS.get(method.name, method) is not method:
            raise ValueError(f"{label} has the name of another method: rename it")
        METHODS[method.name] = method


def _package_of(entry_point: EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist else entry_point.module


_add_plugins()
