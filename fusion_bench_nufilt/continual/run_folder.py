"""The files of a continual run in its log directory."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from typing_extensions import TypedDict

from fusion_bench_nufilt.pages.metrics import AccuracyMatrix
from fusion_bench_nufilt.utils.files import (
    MANIFEST,
    RUN,
    Manifest,
    Score,
    lock_folder,
    read_json,
    write_text,
)
from fusion_bench_nufilt.utils.finished import FinishedFile, FinishedFolder, OtherWorkError
from fusion_bench_nufilt.utils.manifest import (
    Difference,
    differences,
    save_checkpoint,
)

log = logging.getLogger(__name__)

#: The fields of a step's manifest without which a run can't go on from it.
_NEEDED = ("step", "merge_seconds")
_ADVICE = "it is made again"


class _SavedScoring(TypedDict):
    taskpool: dict[str, Any]
    test_data: dict[str, Any]


class _SavedRun(Manifest, total=False):
    scoring: _SavedScoring | None


class _SavedScores(TypedDict):
    tasks: list[str]
    accuracy_matrix: list[list[Score | None]]


@dataclass(frozen=True)
class RunFolder:
    """``checkpoints/merged_model_{i}`` and ``report_{i}.json``, i = step - 1, as FusionBench names
    them.
    """

    path: Path  # the log directory

    def refuse_other_run(self, run: Mapping[str, Any]) -> None:
        """Raise a ValueError if the folder has results of another run than ``run`` describes, or
        scores that another task pool or other test data gave; it names what differs.
        """
        steps = sorted(self.path.glob("checkpoints/merged_model_*"))
        for work in [self._run, *(finished_step(folder) for folder in steps)]:
            try:
                work.refuse_other(run)
            except OtherWorkError as error:
                raise ValueError(
                    f"'{self.path}' holds another run: {error}. Take another log directory "
                    "(path.log_dir), or remove this one"
                ) from None
            except ValueError as error:  # a step that is damaged is made again
                log.warning("%s", error)

    def begin(self, run: Mapping[str, Any]) -> None:
        """Note what the run in this folder, and its scores, depend on, unless the folder has
        results of another.
        """
        self.refuse_other_run(run)
        saved_scoring = self._saved_scoring()
        scoring = run.get("scoring")
        if scoring is None:
            # A run without a task pool leaves the scores that are there as they are.
            scoring = saved_scoring
        elif saved_scoring is None:
            self._delete_reports()
        self._run.keep({**run, "scoring": scoring})

    def _saved_scoring(self) -> _SavedScoring | None:
        """Return what the scores in this folder depend on; None if nothing says so."""
        try:
            saved = self._run.content()
        except ValueError as error:
            log.warning("%s", error)
            return None
        if saved is None:
            return None
        return saved.get("scoring")

    def finished_scores(self, scoring: Mapping[str, Any]) -> AccuracyMatrix | None:
        """Return the scores of the finished run in this folder, as far as another run's task pool
        would give the same: None if it has another configuration, but for further tasks, or if the
        test data of a task that both have differ.
        """
        try:
            saved_scoring = self._saved_scoring()
            advice = "its scores are left out"
            saved = read_json(self.path / "accuracy_matrix.json", _SavedScores, advice)
            if saved is None or saved_scoring is None:
                return None
            matrix = AccuracyMatrix.from_rows(saved["tasks"], saved["accuracy_matrix"])
        except ValueError as error:
            log.warning("%s", error)
            return None
        wanted = json.loads(json.dumps(scoring))
        for part in (saved_scoring, wanted):
            part["taskpool"].pop("tasks", None)
        for task in saved_scoring["test_data"].keys() ^ wanted["test_data"].keys():
            for part in (saved_scoring, wanted):
                part["test_data"].pop(task, None)
        return None if differences(saved_scoring, wanted) else matrix

    def _delete_reports(self) -> None:
        reports = sorted(self.path.glob("report_*.json"))
        if reports:
            log.warning(
                "'%s': nothing says what the scores there were made with: they are made again",
                self.path,
            )
        for report in reports:
            report.unlink()

    def save_report(self, step: int, report: dict[str, Any]) -> None:
        write_text(self._report(step), json.dumps(report))

    def read_report(self, step: int) -> dict[str, Any] | None:
        """Read the scores after a step; None if they were not taken or are damaged."""
        try:
            return read_json(self._report(step), dict[str, dict[str, Any]])
        except ValueError as error:
            log.warning("step %d: %s", step, error)
            return None

    def delete_report(self, step: int) -> None:
        self._report(step).unlink(missing_ok=True)

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
        save_checkpoint(model, self.checkpoint(step), about, state, files)

    def newest_step(self, first: int, last: int) -> Manifest | None:
        """Return the manifest of the newest complete step between two; damaged ones are passed
        over.
        """
        for step in range(last, first - 1, -1):
            work = finished_step(self.checkpoint(step))
            if not work.is_there():
                continue
            try:
                return self.read_step(step)
            except ValueError as error:
                log.warning("step %d: %s; looking for the step before", step, error)
        return None

    def read_step(self, step: int) -> Manifest:
        """Return the manifest of a step; a ValueError says what of it is missing or damaged."""
        work = finished_step(self.checkpoint(step))
        manifest = work.whole()
        if manifest is None:
            raise ValueError(f"'{work.folder}' is not there, or has no {MANIFEST}")
        missing = [field for field in _NEEDED if field not in manifest]
        if missing:
            raise ValueError(f"the manifest of '{work.folder}' has no {missing[0]}")
        if manifest["step"] != step:
            raise ValueError(f"'{work.folder}' is of step {manifest['step']}")
        return manifest

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"merged_model_{step - 1}"

    def _report(self, step: int) -> Path:
        return self.path / f"report_{step - 1}.json"

    @property
    def _run(self) -> FinishedFile[_SavedRun]:
        return FinishedFile(self.path / RUN, _SavedRun, _ADVICE, run_differences)


def finished_step(checkpoint: Path) -> FinishedFolder[_SavedRun]:
    """Return a step in its folder, which is whole or not there."""
    return FinishedFolder(checkpoint / MANIFEST, _SavedRun, _ADVICE, run_differences)


@contextmanager
def open_run_folder(path: str | None) -> Iterator[RunFolder | None]:
    """Lock the log directory, if there is one, for a run; raise a ValueError if it is read-only or
    already locked.
    """
    if path is None:
        yield None
        return
    try:
        # Two runs at once in one log directory would lose or mix their steps.
        lock = lock_folder(Path(path))
    except OSError as error:
        raise ValueError(f"the log directory '{path}' can't be written: {error}") from error
    try:
        yield RunFolder(Path(path))
    finally:
        lock.release()


def run_differences(saved: _SavedRun, run: Mapping[str, Any]) -> list[Difference]:
    """Return what differs between the run that is described in a file and ``run``, as far as its
    weights and, where both were scored, its scores depend on it.

    Models and training data are compared by their content, which may have come from another place.
    """
    # Early in a run, its data have not been looked at yet.
    compared = ["method", "order"]
    if run.get("training_data"):
        compared.append("training_data")
    saved_values = {key: saved.get(key) for key in compared} | saved.get("settings", {})
    run_values = {key: run.get(key) for key in compared} | run["settings"]
    inputs = saved.get("inputs", {})
    for name in {**inputs, **run["inputs"]}:
        key = f"model '{name}'"
        if name not in inputs or name not in run["inputs"]:
            saved_values[key] = inputs.get(name, {}).get("source")
            run_values[key] = run["inputs"].get(name, {}).get("source")
            continue
        # What a run has not read yet, it does not depend on.
        if "loaded" in inputs[name] and "loaded" in run["inputs"][name]:
            saved_values[key] = inputs[name]["loaded"]
            run_values[key] = run["inputs"][name]["loaded"]
    differing = differences(saved_values, run_values)
    saved_scoring = saved.get("scoring")
    scoring = run.get("scoring")
    if saved_scoring is not None and scoring is not None:
        differing += differences(saved_scoring, scoring)
    return differing
