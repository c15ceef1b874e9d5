"""Python's search for garbage, where there is none."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_left() -> Iterator[None]:
    """Search for no garbage while modules are imported, all of which stay: it is a tenth of the
    time that torch and transformers take.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
