"""The peak memory of merging, without that of scoring."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from fusion_bench_nufilt.continual import Evaluator
from fusion_bench_nufilt.continual.evaluation import Report

_PROCESS = Path("/proc/self")


class PeakMemory:
    """The peak of the memory in use since it was last reset.

    On a CUDA device it is the memory that torch has allocated there; elsewhere it is what the process holds in memory,
    which only Linux tells.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known = device.type == "cuda"

    def reset(self) -> None:
        """Start anew with the memory that is in use now."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with suppress(OSError):
            (_PROCESS / "clear_refs").write_text("5")  # which resets the peak, and nothing else
            self._known = True

    def read(self) -> int | None:
        """Return the peak in bytes, or None where it can't be known."""
        if not self._known:
            return None
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        lines = (_PROCESS / "status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


class WatchingEvaluator(Evaluator):
    """An evaluator that keeps the peak memory between its scorings: that of merging and of what stays loaded.

    Args:
        taskpool: the one of :class:`fusion_bench_nufilt.continual.Evaluator`.
        device: the device that merges.
    """

    peak: int | None  # bytes since the last `watch`; None where that can't be known

    def __init__(self, taskpool: object, device: torch.device) -> None:
        super().__init__(taskpool)
        self._memory = PeakMemory(device)
        self.watch()

    def watch(self) -> None:
        """Forget the peak so far."""
        self.peak = None
        self._memory.reset()

    def report(self, model: nn.Module, tasks: Sequence[str], *, others: bool = False) -> Report:
        self.peak = max((peak for peak in (self.peak, self._memory.read()) if peak is not None), default=None)
        try:
            return super().report(model, tasks, others=others)
        finally:
            self._memory.reset()
