"""The files of a continual run in its log directory."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fusion_bench_nufilt.files import atomic_file, write_text

from .checkpoint import load_checkpoint, read_manifest, save_checkpoint
from .evaluation import Report

log = logging.getLogger(__name__)


class RunFolder:
    """``checkpoints/merged_model_{i}`` and ``report_{i}.json``, i = step - 1, as FusionBench names them.

    Args:
        path: the log directory.

    Raises:
        ValueError: nothing can be written there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with atomic_file(path / "write_test") as file:
                file.touch()
            (path / "write_test").unlink()
        except OSError as error:
            raise ValueError(f"the log directory '{path}' can't be written: {error}") from error

    def save_json(self, name: str, content: Any) -> None:
        write_text(self.path / name, json.dumps(content))

    def save_report(self, step: int, report: Report) -> None:
        write_text(self._report(step), json.dumps(report))

    def read_report(self, step: int) -> Report | None:
        return json.loads(self._report(step).read_text()) if self._report(step).is_file() else None

    def save_step(self, step: int, model: nn.Module, about: Mapping[str, Any]) -> None:
        self._report(step).unlink(missing_ok=True)  # an earlier run's would pass for this one's
        save_checkpoint(model, self._checkpoint(step), about)

    def load_step(self, step: int, model: nn.Module) -> None:
        """Give ``model`` the weights that it had after a step."""
        load_checkpoint(model, self._checkpoint(step))

    def newest_step(self, first: int, last: int, run: Mapping[str, Any]) -> dict[str, Any] | None:
        """Manifest of the newest whole step between these two, if there is one; a damaged one is passed over.

        Raises:
            ValueError: that step is of another run than ``run`` describes; names what differs.
        """
        for step in range(last, first - 1, -1):
            folder = self._checkpoint(step)
            if not folder.exists():
                continue
            try:
                manifest = read_manifest(folder)
            except ValueError as error:
                log.warning("%s; looking for the step before", error)
                continue
            if other := [key for key, value in run.items() if manifest["run"].get(key) != value]:
                raise ValueError(
                    f"checkpoint '{folder}' is of a run with another {', '.join(other)}: resume with the same, or take "
                    "another log directory"
                )
            return manifest
        return None

    def _checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"merged_model_{step - 1}"

    def _report(self, step: int) -> Path:
        return self.path / f"report_{step - 1}.json"
