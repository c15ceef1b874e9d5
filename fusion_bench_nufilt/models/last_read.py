"""What was read last, for those who need it again at once."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

_T = TypeVar("_T")


class LastRead(Generic[_T]):
    """Keeps the values that were read last, one for each thread that may be reading.

    Factors of fused experts hold those of all experts of a parameter, which are merged one after
    another, and an update outside the merged layers is added piece by piece. A value is read by one
    thread, and the others wait for it. A copy in another process begins empty.
    """

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, _T] = OrderedDict()
        self._reading = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def get(self, key: Hashable, read: Callable[[], _T]) -> _T:
        """Return the value of a key, which is read if it is not there."""
        with self._reading:
            if key not in self._values:
                self._values[key] = read()
                while len(self._values) > max(4, torch.get_num_threads()):
                    self._values.popitem(last=False)
            self._values.move_to_end(key)
            return self._values[key]
