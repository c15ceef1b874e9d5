"""The options of a merge of folders that no method has a say in."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from fusion_bench_nufilt.core import options
from fusion_bench_nufilt.core.devices import check_devices
from fusion_bench_nufilt.core.options import check_choices, check_whole

option = partial(options.option, panel="Machine")


@dataclass(frozen=True)
class Settings:
    """How folders are merged; the method has settings of its own.

    Raises:
        ValueError: A value is out of its range; the message names the option.
    """

    seed: int = option(42, "Seed of the adapters' initialisation.", panel="Method")
    step: int | None = option(
        None,
        "Number of the first task in the stream, from 1. If it is not given, it is one more than the manifest of the "
        "merged folder says, and 1 without a merged folder.",
    )
    accumulate: Literal["stored", "float32"] = option(
        "stored",
        "What the merged layers are kept in between steps: stored means the base's dtype; float32 also writes them "
        "beside the model for the next merge, so that rounding does not add up.",
    )
    device: str = option(
        "cpu",
        "Where to compute: cpu works on a layer per thread; cuda, or several such as cuda:0,cuda:1, on stacks of "
        "layers.",
    )
    max_memory: int | None = option(
        None, "The most memory to hold, such as 4GB; fewer layers are then worked on at a time."
    )

    engine: Literal["local", "ray"] = option(
        "local",
        "What computes the layers: local is this process; ray is a worker on every node of a Ray cluster, or on every "
        "GPU of it if device is cuda. This process alone writes, and the result is the same.",
    )
    address: str | None = option(
        None,
        "Address of the Ray cluster, such as auto or 10.0.0.1:6379. If it is not given, it is the cluster that this "
        "machine belongs to, or else a new one on this machine alone.",
    )

    def __post_init__(self) -> None:
        if self.step is not None:
            check_whole(self, "step", least=1, most=10**6)
        if self.max_memory is not None:
            check_whole(self, "max_memory", least=1, most=2**62)
        check_choices(self)
        if self.engine == "local":  # a cluster's workers have devices of their own
            check_devices(self.device)
            if self.address is not None:
                raise ValueError(f"address '{self.address}' is for engine=ray")
        elif self.device not in ("cpu", "cuda"):
            raise ValueError(f"device '{self.device}': engine=ray gives every worker a GPU by itself; say cuda, or cpu")

    @property
    def devices(self) -> list[torch.device]:
        """The devices that compute, all of one kind."""
        return [torch.device(name) for name in self.device.split(",")]

    @property
    def on_cpu(self) -> bool:
        """Whether layers are computed in this memory."""
        return self.devices[0].type == "cpu"

    @property
    def workers(self) -> int:
        """The number of batches of layers that this process works on at a time."""
        return torch.get_num_threads() if self.on_cpu else len(self.devices)
