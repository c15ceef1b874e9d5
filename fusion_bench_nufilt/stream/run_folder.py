"""The files of a continual run in its log directory."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fusion_bench_nufilt.storage import resumable
from fusion_bench_nufilt.storage.checkpoint import (
    load_checkpoint,
    read_whole_checkpoint,
    save_checkpoint,
)
from fusion_bench_nufilt.storage.files import lock_folder, read_json, restore_folder, write_text
from fusion_bench_nufilt.storage.schemas import Manifest

log = logging.getLogger(__name__)

_UNREAD = "not read yet"  # in the place of a model's digest


@dataclass(frozen=True)
class RunFolder:
    """``checkpoints/merged_model_{i}`` and ``report_{i}.json``, i = step - 1, as FusionBench names
    them.
    """

    path: Path  # the log directory

    def save_report(self, step: int, report: dict[str, Any]) -> None:
        write_text(self._report(step), json.dumps(report))

    def read_report(self, step: int) -> dict[str, Any] | None:
        """Read the scores after a step; None if they were not taken or are damaged, so that they
        are taken again.
        """
        try:
            return read_json(self._report(step), dict[str, dict[str, Any]])
        except ValueError as error:
            log.warning("%s; scoring step %d again", error, step)
            return None

    def save_step(
        self,
        step: int,
        model: nn.Module,
        about: Mapping[str, Any],
        state: Mapping[str, Tensor],
        files: Mapping[str, bytes],
    ) -> None:
        """Save the model after a step, with its manifest, the state to go on from, and further
        files.
        """
        self._report(step).unlink(
            missing_ok=True
        )  # else an earlier run's would pass for this one's
        save_checkpoint(model, self.checkpoint(step), about, state, files)

    def load_step(self, step: int, model: nn.Module) -> None:
        """Give ``model`` the weights that it had after a step; damage is a ValueError that names
        the file.
        """
        read_whole_checkpoint(self.checkpoint(step))
        load_checkpoint(model, self.checkpoint(step))

    def newest_step(
        self, first: int, last: int, run: Mapping[str, Any]
    ) -> tuple[Path, Manifest] | None:
        """Return the folder and manifest of the newest complete step between two; damaged steps are
        passed over.

        Refuse a step of another run than ``run`` describes, naming what differs.
        """
        for step in range(last, first - 1, -1):
            folder = self.checkpoint(step)
            restore_folder(folder)
            if not folder.exists():
                continue
            try:
                manifest = read_whole_checkpoint(folder)
            except ValueError as error:
                log.warning("step %d: %s; looking for the step before", step, error)
                continue
            if manifest.get("step", step) != step:
                log.warning(
                    "step %d: '%s' is of step %d; looking for the step before",
                    step,
                    folder,
                    manifest["step"],
                )
                continue
            if other := differences(manifest, run):
                raise ValueError(
                    f"step {step} in '{folder}' is of a run with another {', '.join(other)}: "
                    "resume with the same, or "
                    "take another log directory"
                )
            return folder, manifest
        return None

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"merged_model_{step - 1}"

    def _report(self, step: int) -> Path:
        return self.path / f"report_{step - 1}.json"


@contextmanager
def open_run_folder(path: str | None) -> Iterator[RunFolder | None]:
    """Lock the log directory, if there is one, for a run; raise a ValueError if it is read-only or
    already locked.
    """
    if path is None:
        yield None
        return
    try:
        lock = lock_folder(Path(path))
    except OSError as error:
        raise ValueError(f"the log directory '{path}' can't be written: {error}") from error
    try:
        yield RunFolder(Path(path))
    finally:
        lock.release()


def differences(manifest: Manifest, run: Mapping[str, Any]) -> list[str]:
    """Name what differs between the run that wrote a manifest and the run that is described.

    Models are compared by their weights: the same weights may come from another place.
    """
    if lacking := [
        key
        for key in ("step", "merge_seconds", "method", "order", "inputs", "settings")
        if key not in manifest
    ]:
        return [f"version of this package (its manifest has no {', '.join(lacking)})"]
    before, now = _depends_on(manifest), _depends_on(run)
    for model in manifest["inputs"].keys() & run["inputs"].keys():
        if before[f"model '{model}'"] == _UNREAD:
            del now[f"model '{model}'"]
    return [each.name for each in resumable.differences({key: before.get(key) for key in now}, now)]


def _depends_on(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that decides the weights after each step."""
    models = {
        f"model '{name}'": model.get("sha256", _UNREAD) for name, model in run["inputs"].items()
    }
    return {"method": run["method"], "order": run["order"], **run["settings"], **models}
