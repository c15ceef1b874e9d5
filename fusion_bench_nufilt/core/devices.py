"""Several devices in one process: whichever is free takes the next layers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Literal

import torch

from .checks import check_device
from .options import option

Devices = torch.device | str | Sequence[torch.device | str]


@dataclass(frozen=True)
class DeviceConfig:
    """Where layers are computed.

    Raises:
        ValueError: neither all nor a list of numbers.
    """

    devices: Literal["all"] | Sequence[int] | None = option(
        None,
        "GPUs that compute layers side by side: all, or a list of their numbers. null: the one that the run is on. The "
        "result is the same.",
        panel="Machine",
    )

    def __post_init__(self) -> None:
        if (numbers := self.devices) is None or numbers == "all":
            return
        if not isinstance(numbers, list | tuple) or not numbers or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"devices must be all, or a list of numbers of GPUs such as [0,1], got {numbers!r}")

    def choose(self, otherwise: torch.device) -> list[torch.device]:
        """The devices.

        Raises:
            ValueError: all GPUs are wanted and there is none.
        """
        if self.devices is None:
            return [otherwise]
        numbers = range(torch.cuda.device_count()) if self.devices == "all" else self.devices
        if not numbers:
            raise ValueError("devices=all: PyTorch sees no GPU; leave devices out")
        return [torch.device("cuda", int(number)) for number in numbers]


def as_devices(devices: Devices) -> list[torch.device]:
    """Devices as objects; a text names several with commas between."""
    return list(map(torch.device, _each(devices)))


def check_devices(devices: Devices) -> list[torch.device]:
    """Refuse devices that :func:`check_device` refuses, and such as would not give the same bits.

    Raises:
        ValueError: names the device.
    """
    found = [check_device(device) for device in _each(devices)]
    if len({device.type for device in found}) != 1:
        raise ValueError(f"devices must be of one kind, got {', '.join(map(str, found)) or 'none'}")
    return found


def _each(devices: Devices) -> Sequence[torch.device | str]:
    if isinstance(devices, torch.device):
        return [devices]
    return devices.split(",") if isinstance(devices, str) else devices


def fast_in_float64(where: torch.device) -> bool:
    """Whether a device computes in float64 at half its rate in float32 or more, as NVIDIA's P100 to B200 do."""
    capabilities = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
    return where.type == "cuda" and torch.cuda.get_device_capability(where) in capabilities


class DevicePool:
    """Devices, each for one thread at a time; a single one is for as many as there are."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._free: SimpleQueue[torch.device] = SimpleQueue()
        for device in devices:
            self._free.put(device)

    @contextmanager
    def free(self) -> Iterator[torch.device]:
        """Wait for a device and hold it."""
        if len(self._devices) == 1:
            yield self._devices[0]
            return
        device = self._free.get()
        try:
            yield device
        finally:
            self._free.put(device)
