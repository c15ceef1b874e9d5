"""The folder of a comparison, with a file for every finished run, so that an interrupted comparison goes on."""

import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from fusion_bench_nufilt.continual import AccuracyMatrix
from fusion_bench_nufilt.results.metrics import or_none
from fusion_bench_nufilt.storage.files import lock_folder, write_text
from fusion_bench_nufilt.storage.json_files import read_json

from .specs import RunSpec

References = dict[str, dict[str, float]]
"""The scores of the single models, by ``pretrained`` or ``individual`` and by task; NaN where there is none."""


@dataclass(frozen=True)
class Run:
    """The scores of one method on one seed, or the reason why there are none."""

    seed: int
    config: dict[str, Any]  # the method's, resolved
    environment: dict[str, str]  # versions and device
    matrix: AccuracyMatrix | None = None
    merge_seconds: list[float] = field(default_factory=list)  # one number for each step
    solving_seconds: float | None = None  # the solver's share of these, for a method that has one
    memory: int | None = None  # peak bytes while merging, see WatchingEvaluator
    parameters: int | None = None  # how many the final model has
    extra_parameters: int | None = None  # how many more than the pretrained model
    error: str | None = None
    traceback: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return what was measured, and with which settings."""
        return {
            "config": self.config,
            "tasks": self.matrix and self.matrix.tasks,
            "accuracy_matrix": self.matrix and self.matrix.rows(),
            "merge_seconds": self.merge_seconds,
            "solving_seconds": self.solving_seconds,
            "memory": self.memory,
            "parameters": self.parameters,
            "extra_parameters": self.extra_parameters,
            "error": self.error,
        }


class _Settings(TypedDict):
    modelpool: str
    weights: NotRequired[dict[str, str]]


class _Saved(TypedDict):
    config: dict[str, Any]
    environment: dict[str, str]
    tasks: list[str] | None
    accuracy_matrix: list[list[float | None]] | None
    merge_seconds: list[float]
    solving_seconds: NotRequired[float | None]
    memory: NotRequired[int | None]
    parameters: NotRequired[int | None]
    extra_parameters: NotRequired[int | None]
    error: str | None


class Store:
    """The files of a comparison.

    Args:
        folder: it is made if it is not there.
        settings: all that every run depends on, for JSON, without the models' weights, see :meth:`identify`.
        overwrite: delete what the folder holds of a comparison; otherwise it goes on.

    Raises:
        ValueError: the folder holds results of other settings, is held by another process, or is no folder.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], *, overwrite: bool = False) -> None:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--out {folder}: there is a file of that name")
        self.folder, self.settings = folder, settings
        self._file, self._references = folder / "compare.json", folder / "references.json"
        self._lock = lock_folder(folder)
        try:
            if overwrite:
                self._delete()
            self._there: dict[str, Any] | None = read_json(self._file, dict[str, Any], _DELETE)
            if self._there is not None:
                checked = {key: value for key, value in self._there.items() if key != "weights"}
                if checked != settings:
                    difference = _difference(checked, settings)
                    raise ValueError(f"{folder} holds results of other settings: {difference}. {_WAY_OUT}")
        except BaseException:
            self.close()
            raise

    def identify(self, weights: dict[str, str]) -> None:
        """Write the settings and what the models' weights are.

        Args:
            weights: the digests of the models, by name.

        Raises:
            ValueError: the folder holds results of models with other weights; names one.
        """
        if self._there is not None:
            if (known := self._there.get("weights")) is None:
                raise ValueError(
                    f"{self.folder} was made by an older version, which did not keep what the models' weights were. "
                    f"{_WAY_OUT}"
                )
            if other := [name for name in {**known, **weights} if known.get(name) != weights.get(name)]:
                raise ValueError(
                    f"{self.folder} holds results of other models: '{other[0]}' has other weights there. {_WAY_OUT}"
                )
        self.settings = {**self.settings, "weights": weights}
        write_text(self._file, json.dumps(self.settings, indent=2))

    def close(self) -> None:
        """Let other processes write here."""
        self._lock.release()

    def _delete(self) -> None:
        """Delete the comparison that the folder holds, and nothing else.

        Raises:
            ValueError: what looks like a comparison has no settings beside it, or those of something else.
        """
        settings = read_json(self._file, _Settings, advice="delete what it belongs to by hand")
        if settings is None and (self.folder / "runs").exists():
            raise ValueError(f"'{self.folder}' has no compare.json: its runs/ is no comparison's and is not deleted")
        for file in self.folder.glob("runs/*/*.json"):
            file.unlink()
        for folder in [*self.folder.glob("runs/*"), self.folder / "runs"]:
            with suppress(OSError):  # holds something else, or is not there
                folder.rmdir()
        self._file.unlink(missing_ok=True)
        self._references.unlink(missing_ok=True)

    def load(self, spec: RunSpec, seed: int, config: dict[str, Any]) -> Run | None:
        """Return the finished run of a method on a seed, or None; a failed run is to be tried again.

        Raises:
            ValueError: the run under this label has another configuration, or its file is damaged.
        """
        file = self._run_file(spec, seed)
        content = read_json(file, _Saved, _DELETE)
        if content is None or content["error"] is not None:
            return None
        if content["config"] != config:
            what = _difference(content["config"], config)
            raise ValueError(f"{self.folder} holds results of '{spec.label}' with other settings: {what}. {_WAY_OUT}")
        tasks, rows = content["tasks"], content["accuracy_matrix"]
        if not tasks or not rows or {len(rows), *map(len, rows)} != {len(tasks)}:
            raise ValueError(f"'{file}' is damaged: no matrix of {len(tasks or ())} tasks; {_DELETE}")
        matrix = AccuracyMatrix.from_rows(tasks, rows)
        keys = ("solving_seconds", "memory", "parameters", "extra_parameters")
        measured: dict[str, Any] = {key: content.get(key) for key in keys}
        return Run(seed, config, content["environment"], matrix, content["merge_seconds"], **measured)

    def save(self, spec: RunSpec, run: Run) -> None:
        """Write a run to its file."""
        content = {
            "label": spec.label,
            "seed": run.seed,
            "environment": run.environment,
            **run.as_json(),
            "traceback": run.traceback,
        }
        file = self._run_file(spec, run.seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(content, indent=2))

    def load_references(self) -> References | None:
        """Return the scores of the single models, or None."""
        if (content := read_json(self._references, dict[str, dict[str, float | None]], _DELETE)) is None:
            return None
        return {
            label: {task: math.nan if value is None else value for task, value in scores.items()}
            for label, scores in content.items()
        }

    def save_references(self, references: References) -> None:
        """Write the scores of the single models."""
        write_text(self._references, json.dumps(references_as_json(references), indent=2))

    def _run_file(self, spec: RunSpec, seed: int) -> Path:
        return self.folder / "runs" / spec.safe_label / f"{seed}.json"


_DELETE = "delete it, and it is made again"
_WAY_OUT = "Choose another folder or label, or delete them with --overwrite"


def references_as_json(references: References) -> dict[str, dict[str, float | None]]:
    """Return the scores for JSON, which knows no NaN."""
    return {label: {task: or_none(value) for task, value in scores.items()} for label, scores in references.items()}


def _difference(there: dict[str, Any], here: dict[str, Any], path: tuple[str, ...] = ()) -> str:
    """Name the first settings that differ."""
    found = []
    for key in [*there, *(key for key in here if key not in there)]:
        old, new = there.get(key), here.get(key)
        if isinstance(old, dict) and isinstance(new, dict) and old != new:
            found.append(_difference(old, new, (*path, key)))
        elif old != new:
            found.append(f"{'.'.join((*path, key))} is {_short(old)} there and {_short(new)} here")
    return "; ".join(found[:3])


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
