"""Losses of whole methods: measured while they merge, or on the checkpoints of a run."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from typing_extensions import TypedDict

from fusion_bench_nufilt.compare.configs import compose_run, plain
from fusion_bench_nufilt.compare.experiment import WatchingEvaluator
from fusion_bench_nufilt.compare.presets import rank_for_width
from fusion_bench_nufilt.compare.specs import RunSpec
from fusion_bench_nufilt.continual.evaluation import Report
from fusion_bench_nufilt.core import FusionConfig
from fusion_bench_nufilt.core.options import is_number
from fusion_bench_nufilt.results.metrics import or_none
from fusion_bench_nufilt.storage.checkpoint import load_checkpoint, read_whole_checkpoint
from fusion_bench_nufilt.storage.json_files import read_json
from fusion_bench_nufilt.storage.manifest import Manifest

from .losses import LossTracker
from .pool import PoolAnalysis
from .results import Analysis

log = logging.getLogger(__name__)


class Scores(TypedDict):
    """What is read of a run's ``accuracy_matrix.json``."""

    ACC: float | None
    BWT: float | None


def default_methods(width: int) -> str:
    """Name NUFILT, its ablations and three baselines, with the paper's ranks in proportion to the width."""
    r_p, r_l = rank_for_width("null_rank", 128, width), rank_for_width("lora_rank", 64, width)
    ranks = f"null_rank={r_p}:lora_rank={r_l}"
    return (
        f"NUFILT {r_p}/{r_l}/8=nufilt:{ranks}, filter only ({r_p})=nufilt/filter_only:null_rank={r_p}, "
        f"adapter only ({r_l}/8)=nufilt/adapter_only:{ranks}, naive sum=nufilt/naive, opcm, task_arithmetic, "
        "weight_average"
    )


def measure_methods(
    pool: PoolAnalysis,
    result: Analysis,
    specs: Sequence[RunSpec],
    overrides: Sequence[str],
    on_step: Callable[[], Any] = lambda: None,
) -> None:
    """Run methods over the stream, and put their losses, ACC and BWT into ``result``; one that fails says why there."""
    settings = ["++method.evaluate=every_step", "++method.save_on_every_step=false", "++method.check_models=false"]
    for number, spec in enumerate(specs):
        config = plain(compose_run([*settings, *overrides, *spec.overrides]).method)
        tracker = LossTracker(pool, spec.label, _ranks(config), bounds=number == 0)
        experiment = copy.copy(pool.experiment)
        vars(experiment)["evaluator"] = _TrackingEvaluator(pool, tracker, on_step)
        run = experiment.run({**config, "seed": pool.config.seed})
        if run.matrix is None:
            result.failures[spec.label] = str(run.error)
            log.warning("%s failed: %s", spec.label, run.error)
            continue
        result.losses += tracker.rows
        result.scores[spec.label] = {"ACC": or_none(run.matrix.acc), "BWT": or_none(run.matrix.bwt)}


class _TrackingEvaluator(WatchingEvaluator):
    """Measures the losses of every step that is scored, and scores only what ACC and BWT need."""

    def __init__(self, pool: PoolAnalysis, tracker: LossTracker, on_step: Callable[[], Any]) -> None:
        self._pool_evaluator = pool.experiment.evaluator  # which has encoded the prompts already
        super().__init__(self._pool_evaluator.taskpool, pool.experiment.fabric.device)
        self._pool, self._tracker, self._on_step = pool, tracker, on_step

    def report(self, model: nn.Module, tasks: Sequence[str], *, others: bool = False) -> Report:
        self._tracker.update(tasks[-1], model, self._pool.load(tasks[-1]))
        self._on_step()
        last = len(tasks) == len(self._pool.tasks)
        return self._pool_evaluator.report(model, tasks if last else tasks[-1:])


class FinishedRun(NamedTuple):
    """A run in a log directory that has the checkpoints of all its steps."""

    folder: Path
    label: str
    manifest: Manifest  # of its last step


def finished_runs(folders: Sequence[Path]) -> list[FinishedRun]:
    """Read finished runs, and label them with their methods, or with their folders where two are of one method.

    Raises:
        ValueError: a folder is no run with the checkpoints of all its steps; names it.
    """
    manifests = [_last_manifest(folder) for folder in folders]
    methods = [manifest["method"] for manifest in manifests]
    return [
        FinishedRun(folder, method if methods.count(method) == 1 else folder.name, manifest)
        for folder, method, manifest in zip(folders, methods, manifests, strict=True)
    ]


def measure_run(
    pool: PoolAnalysis, result: Analysis, run: FinishedRun, on_step: Callable[[], Any] = lambda: None
) -> None:
    """Put the losses of a finished run, from its checkpoints, into ``result``.

    Raises:
        ValueError: it is a run of other models than the pool's; names them.
    """
    order, inputs = run.manifest["order"], run.manifest["inputs"]
    if sorted(order) != sorted(pool.tasks):
        raise ValueError(
            f"'{run.folder}' is a run of {', '.join(order)}, and the model pool has {', '.join(pool.tasks)}"
        )
    for name, digest in pool.experiment.digests.items():
        if inputs.get(name, {}).get("sha256") != digest:
            raise ValueError(f"'{run.folder}' is a run of other models: '{name}' has other weights there")
    tracker = LossTracker(pool, run.label, _ranks(run.manifest["settings"]), bounds=not result.losses)
    merged = copy.deepcopy(pool.pretrained)
    for step, task in enumerate(order):
        load_checkpoint(merged, _checkpoint(run.folder, step))
        tracker.update(task, merged, pool.load(task))
        on_step()
    result.losses += tracker.rows
    if scores := read_json(run.folder / "accuracy_matrix.json", Scores, "resume the run, and it is written again"):
        result.scores[run.label] = {"ACC": scores["ACC"], "BWT": scores["BWT"]}


def _checkpoint(folder: Path, step: int) -> Path:
    """Return the folder of a step; the first step is 0."""
    return folder / "checkpoints" / f"merged_model_{step}"


def _last_manifest(folder: Path) -> Manifest:
    """Return the manifest of a run's last step, once the checkpoints of all steps are found to be whole."""
    if not (first := _checkpoint(folder, 0)).is_dir():
        raise ValueError(
            f"'{folder}' is no log directory of a run with its checkpoints (there is no {first}): run with "
            "method.save_on_every_step=true"
        )
    manifest = read_whole_checkpoint(first)
    if lacking := [key for key in ("method", "order", "inputs", "settings") if key not in manifest]:
        raise ValueError(f"'{folder}' is a run of another version (its manifest has no {lacking[0]}): run it again")
    count = len(manifest["order"])
    for step in range(1, count):
        if not _checkpoint(folder, step).is_dir():
            raise ValueError(f"'{folder}' lacks the checkpoint of step {step + 1} of {count}: is the run finished?")
        manifest = read_whole_checkpoint(_checkpoint(folder, step))
    return manifest


def _ranks(settings: Mapping[str, Any]) -> FusionConfig:
    """Return the method's ranks r_p and r_v, as numbers or shares of the width; those of NUFILT where it has none."""
    known = {key: settings[key] for key in ("null_rank", "task_rank") if is_number(settings.get(key))}
    return FusionConfig(**known)
