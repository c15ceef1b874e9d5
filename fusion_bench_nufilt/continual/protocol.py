"""The settings of a run: its protocol, and the devices that it uses."""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import torch

from fusion_bench_nufilt.utils import options
from fusion_bench_nufilt.utils.options import check_choices, check_seed, check_whole

_warn_once = cache(logging.getLogger(__name__).warning)

Evaluate = Literal["last", "diagonal", "every_step", "every_step_all"]

option = partial(options.option, panel="Protocol")


@dataclass(frozen=True)
class ProtocolConfig:
    """How a stream of models is merged, scored and saved by any method; a ValueError names a bad
    key.
    """

    shuffle_order: bool = option(
        True,
        "Shuffle the pool's order by random.Random(seed).shuffle(names); seeds 42 to 51 give the "
        "paper's orders.",
    )
    seed: int = option(42, "Seed of the order and of everything drawn.")
    evaluate: Evaluate = option(
        "diagonal",
        "What is scored. last: the final model. diagonal: also each task right after its step, "
        "which BWT needs. "
        "every_step: all tasks so far at every step. every_step_all: also those to come, which FWT "
        "needs.",
    )
    save_on_every_step: bool = option(
        True,
        "Keep the model after each step; checkpoints/merged_model_0 is that after step 1.",
        scope="run",
    )
    check_models: bool = option(True, "Load every model before the first step.", scope="run")
    check_taskpool: bool = option(
        True, "Score one item of each task before the first step.", scope="run"
    )
    resume: bool = option(
        False, "Go on after the last complete step in the same log directory.", scope="run"
    )
    num_merged: int | None = option(
        None, "Number of models in the pool's _merged_ model; null: as its manifest says."
    )
    verify: bool = option(
        True, "Check by digests that the pool's _merged_ model is what was saved.", scope="run"
    )

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_choices(self)
        if self.num_merged is not None:
            check_whole(self, "num_merged", least=1)
        if self.resume and not self.save_on_every_step:
            raise ValueError(
                "resume=true needs the checkpoints that save_on_every_step=false does not keep"
            )


@dataclass(frozen=True)
class DeviceConfig:
    """Where layers are computed; a ValueError unless it is null, all or a list of numbers."""

    devices: Literal["all"] | Sequence[int] | None = options.option(
        None,
        "GPUs that share the layers: all, or a list of their numbers; null: the one that the run "
        "is on.",
        panel="Machine",
        scope="run",
    )

    def __post_init__(self) -> None:
        numbers = self.devices
        if numbers is None or numbers == "all":
            return
        is_list = isinstance(numbers, list | tuple) and len(numbers) > 0
        # The type is compared, since True is an int.
        if not is_list or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(
                f"devices must be all, or a list of numbers of GPUs such as [0,1], got {numbers!r}"
            )

    def choose(self, otherwise: torch.device) -> list[torch.device]:
        """Return the devices, by default ``otherwise``, or the CPU in place of a Mac's GPU; no GPUs
        is a ValueError.
        """
        if self.devices is None:
            if otherwise.type in ("cpu", "cuda"):
                return [otherwise]
            _warn_once(
                "layers are computed on the CPU: PyTorch has no eigenvalue solver for %s",
                otherwise.type,
            )
            return [torch.device("cpu")]
        numbers = self.devices
        if numbers == "all":
            numbers = range(torch.cuda.device_count())
        if not numbers:
            raise ValueError("devices=all: PyTorch sees no GPU; leave devices out")
        return [torch.device("cuda", int(number)) for number in numbers]


def task_order(names: Sequence[str], *, shuffle: bool, seed: int) -> list[str]:
    """Return the names in the order of the run, the same as that of FusionBench's continual methods
    for the seed.
    """
    order = list(names)
    if shuffle:
        random.Random(seed).shuffle(order)
    return order


def tasks_to_score(order: Sequence[str], step: int, evaluate: Evaluate) -> list[str]:
    """Return the tasks to score once ``step`` tasks are merged, see
    :attr:`ProtocolConfig.evaluate`.

    Of T tasks, ``diagonal`` takes 2T-1 scores in all, ``every_step`` T(T+1)/2 and
    ``every_step_all`` T^2.
    """
    if evaluate == "every_step_all":
        return list(order)
    if step == len(order) or evaluate == "every_step":
        return list(order[:step])
    if evaluate == "diagonal":
        return [order[step - 1]]
    return []  # evaluate == "last"
