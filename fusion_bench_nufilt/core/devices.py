"""Several devices in one process: whichever is free takes the next layers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from .checks import check_device

Devices = torch.device | str | Sequence[torch.device | str]
"""One device, a list of devices, or a text with commas between their names."""


def check_devices(devices: Devices) -> list[torch.device]:
    """Return the devices, or raise a ValueError if :func:`check_device` does or if they are of several kinds.

    Devices of several kinds would not give the same bits.
    """
    names = devices.split(",") if isinstance(devices, str) else devices
    found = [check_device(name) for name in ([names] if isinstance(names, torch.device) else names)]
    if len({device.type for device in found}) != 1:
        raise ValueError(f"devices must be of one kind, got {', '.join(map(str, found)) or 'none'}")
    return found


def fast_in_float64(where: torch.device) -> bool:
    """Tell whether a device has at least half its float32 rate in float64, as NVIDIA's P100 to B200 have."""
    capabilities = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
    return where.type == "cuda" and torch.cuda.get_device_capability(where) in capabilities


class DevicePool:
    """Devices that each compute for one thread at a time; a single device computes for all threads."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._only = devices[0] if len(devices) == 1 else None
        self._free: SimpleQueue[torch.device] = SimpleQueue()
        for device in devices:
            self._free.put(device)

    @contextmanager
    def free(self) -> Iterator[torch.device]:
        """Wait for a device that is free, and hold it."""
        if self._only is not None:
            yield self._only
            return
        device = self._free.get()
        try:
            yield device
        finally:
            self._free.put(device)
