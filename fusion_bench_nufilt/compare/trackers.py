"""The scores and pictures of a comparison for trackers such as TensorBoard, Weights & Biases and MLflow."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusion_bench.utils import instantiate
from omegaconf import OmegaConf

from fusion_bench_nufilt.compare.overrides import key_of
from fusion_bench_nufilt.continual.trackers import log_picture
from fusion_bench_nufilt.results.metrics import or_none

from .configs import compose_run, composing
from .summary import Comparison


def is_tracker(override: str) -> bool:
    """Tell whether an override names a tracker or sets an option of one, such as ``fabric/loggers=csv_logger``."""
    return key_of(override).replace("/", ".").split(".")[:2] == ["fabric", "loggers"]


def trackers(overrides: Sequence[str], folder: Path) -> list[Any]:
    """Make the trackers that the overrides name, with their files in ``folder``.

    Raises:
        ValueError: there is no such tracker, or it takes its name from Hydra, which does not run here.
    """
    if not any(map(is_tracker, overrides)):
        return []
    config = compose_run([*overrides, f"path.log_dir='{folder}'"]).fabric.loggers
    written: Any = OmegaConf.to_container(config)
    for key, value in written.items():
        if "${hydra:" in str(value):
            raise ValueError(f"say fabric.loggers.{key}=NAME: a comparison has no name of its own for the tracker")
    with composing():
        return [instantiate(config)]


def log_comparison(comparison: Comparison, loggers: Sequence[Any], pictures: Sequence[Path]) -> None:
    """Log the score of every task after every step, for each method and seed, and at the end the means over seeds."""
    last = len(comparison.tasks)
    for logger in loggers:
        for method in comparison.finished:
            label = method.spec.label
            for run in method.runs:
                if run.matrix is not None:
                    for step, row in enumerate(run.matrix.rows(), 1):
                        names = (f"{label}/seed {run.seed}/{task}" for task in run.matrix.tasks)
                        _log(logger, dict(zip(names, row, strict=True)), step)
            _log(logger, {f"{label}/{name}": or_none(mean.mean) for name, mean in method.metrics.items()}, last)
    for picture in pictures:
        log_picture(loggers, picture.stem, picture, last)
    for logger in loggers:
        logger.finalize("success")


def _log(logger: Any, scores: dict[str, float | None], step: int) -> None:
    if known := {name: score for name, score in scores.items() if score is not None}:
        logger.log_metrics(known, step=step)
