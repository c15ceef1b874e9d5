"""The most memory that merging takes, told apart from scoring."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from fusion_bench_nufilt.continual import Evaluator
from fusion_bench_nufilt.continual.evaluation import Report

_PROCESS = Path("/proc/self")


class PeakMemory:
    """Highest use of memory since it was last reset.

    On a CUDA device, what torch has allocated there; else what the process holds in memory, where Linux tells.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known = device.type == "cuda"

    def reset(self) -> None:
        """Forget what was used so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with suppress(OSError):
            (_PROCESS / "clear_refs").write_text("5")  # which resets the peak, and nothing else
            self._known = True

    def read(self) -> int | None:
        """Bytes; None where that can't be known."""
        if not self._known:
            return None
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        lines = (_PROCESS / "status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


class WatchingEvaluator(Evaluator):
    """Keeps the most memory that was in use between its scorings: that of merging, and of all that stays loaded.

    Args:
        taskpool: as of :class:`fusion_bench_nufilt.continual.Evaluator`.
        device: that merges.
    """

    peak: int | None  # bytes since the last `watch`; None where that can't be known

    def __init__(self, taskpool: object, device: torch.device) -> None:
        super().__init__(taskpool)
        self._memory = PeakMemory(device)
        self.watch()

    def watch(self) -> None:
        """Begin anew."""
        self.peak = None
        self._memory.reset()

    def report(self, model: nn.Module, tasks: Sequence[str], *, others: bool = False) -> Report:
        self.peak = max((peak for peak in (self.peak, self._memory.read()) if peak is not None), default=None)
        try:
            return super().report(model, tasks, others=others)
        finally:
            self._memory.reset()
