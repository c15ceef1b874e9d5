"""How folders are merged: options that need no torch before they are used."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from fusion_bench_nufilt.utils.options import (
    check_choices,
    check_seed,
    check_whole,
    is_number,
    option,
)

if TYPE_CHECKING:
    import torch

_option = partial(option, panel="Machine")

#: One batch of layers is read, one is solved and one is written at a time.
BATCHES_PER_GPU = 3

#: On an accelerator, layers of equal shape are solved together within about this much memory.
BATCH_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Settings:
    """How folders are merged, apart from the method's options; a ValueError for a value out of its
    range.
    """

    seed: int = _option(42, "Seed of the adapters' initialisation.", panel="Method")
    weights: Sequence[float] | None = _option(
        None,
        "Strength of each task's update, in the order of the tasks; 1 by default.",
        panel="Method",
        scope="tasks",
    )
    tokenizer: str | None = _option(
        None,
        "Whose tokens the result has where models brought new ones: base, union or the name of a "
        "task. The default is "
        "union, or base if on_shape_mismatch is keep-base.",
        panel="Layers",
        scope="merge",
    )
    step: int | None = _option(
        None,
        "Number of the first task in the stream, from 1; by default, as the manifest of what is "
        "merged says.",
        scope="run",
    )
    state: bool | None = _option(
        None,
        "Keep what the next merge needs beside the model: the sums of order-free methods, and in "
        "float32 what the model rounds, which are NUFILT's layers and the means of other_params. "
        "By default, methods with sums do.",
        panel="Files",
        scope="merge",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = _option(
        "auto",
        "Type of the result: auto is the base's, with FP8 as bfloat16.",
        panel="Files",
    )
    max_shard_size: int | None = _option(
        None,
        "The largest size of a weight file, such as 5GB; by default, the base's files.",
        panel="Files",
    )
    device: str = _option(
        "cpu",
        "Where to compute: cpu, or cuda, or several such as cuda:0,cuda:1.",
        scope="run",
    )
    verify: bool = _option(
        True,
        "Check that earlier results and the models named in a manifest are unchanged.",
        scope="run",
    )
    max_memory: int | None = _option(
        None, "The most memory to use, such as 4GB, with fewer layers at a time.", scope="run"
    )
    engine: Literal["local", "ray"] = _option(
        "local",
        "What computes: this process, or workers on every node of a Ray cluster (with device=cuda, "
        "on every GPU).",
        scope="run",
    )
    address: str | None = _option(
        None,
        "Address of the Ray cluster, such as 10.0.0.1:6379; by default this machine's, or a new "
        "one on it.",
        scope="run",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_seed(self.seed)
        if self.weights is not None:
            is_list = isinstance(self.weights, list | tuple) and len(self.weights) > 0
            if not is_list or not all(map(is_number, self.weights)):
                raise ValueError(f"weights must be a list of numbers, got {self.weights!r}")
        if self.step is not None:
            check_whole(self, "step", least=1, most=10**6)
        if self.state is not None and not isinstance(self.state, bool):
            raise ValueError(f"state must be true or false, got {self.state!r}")
        for size in ("max_memory", "max_shard_size"):
            if getattr(self, size) is not None:
                check_whole(self, size, least=1, most=2**62)
        if self.engine == "local":  # a cluster's workers choose their own devices
            from fusion_bench_nufilt.utils.devices import check_devices

            check_devices(self.device)
            if self.address is not None:
                raise ValueError(f"address '{self.address}' is for engine=ray")
        elif self.device not in ("cpu", "cuda"):
            raise ValueError(
                f"device '{self.device}': engine=ray gives every worker a GPU by itself; say cuda, "
                "or cpu"
            )

    @property
    def devices(self) -> list["torch.device"]:
        import torch

        return [torch.device(name) for name in self.device.split(",")]

    @property
    def on_cpu(self) -> bool:
        return self.devices[0].type == "cpu"

    @property
    def workers(self) -> int:
        """The number of batches of layers that this process works on at a time."""
        import torch

        if self.on_cpu:
            return torch.get_num_threads()
        return BATCHES_PER_GPU * len(self.devices)
