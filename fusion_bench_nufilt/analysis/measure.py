"""Losses of whole methods: measured while they merge, or on the checkpoints of a run."""

import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from typing_extensions import TypedDict

from fusion_bench_nufilt.compare.configs import compose_run, plain
from fusion_bench_nufilt.compare.memory import WatchingEvaluator
from fusion_bench_nufilt.compare.pairs import run_pair
from fusion_bench_nufilt.compare.specs import RunSpec
from fusion_bench_nufilt.continual.evaluation import Report
from fusion_bench_nufilt.core import FusionConfig
from fusion_bench_nufilt.core.options import is_number
from fusion_bench_nufilt.results.metrics import or_none
from fusion_bench_nufilt.storage.checkpoint import load_checkpoint, read_whole_checkpoint
from fusion_bench_nufilt.storage.identity import model_digest
from fusion_bench_nufilt.storage.json_files import read_json
from fusion_bench_nufilt.storage.manifest import Manifest

from .losses import Meter
from .pool import PoolAnalysis
from .results import Analysis

log = logging.getLogger(__name__)


class Scores(TypedDict):
    """What is read of a run's ``accuracy_matrix.json``."""

    ACC: float | None
    BWT: float | None


def default_methods(width: int) -> str:
    """NUFILT, its ablations and three baselines; ranks in proportion to the width, the paper's at 768 and above."""
    share = min(1.0, width / 768)
    r_p, r_l = round(128 * share), round(64 * share)
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
    inputs = pool.few_inputs()
    for number, spec in enumerate(specs):
        settings = ["++method.evaluate=every_step", "++method.save_on_every_step=false", "++method.check_models=false"]
        config = plain(compose_run([*settings, *overrides, *spec.overrides]).method)
        meter = Meter(
            spec.label,
            pool.layers,
            pool.views,
            pool.weights,
            pool.moments,
            _ranks(config),
            bounds=number == 0,
            inputs=inputs,
            model=pool.pretrained,
        )
        bench = copy.copy(pool.workbench)
        vars(bench)["evaluator"] = _Watcher(pool, meter, on_step)
        run = run_pair(bench, {**config, "seed": pool.config.seed}, pool.config.seed, lambda step: None)
        if run.matrix is None:
            result.failures[spec.label] = str(run.error)
            log.warning("%s failed: %s", spec.label, run.error)
            continue
        result.losses += meter.rows
        result.scores[spec.label] = {"ACC": or_none(run.matrix.acc), "BWT": or_none(run.matrix.bwt)}


class _Watcher(WatchingEvaluator):
    """Shows a meter every step that is scored, and has only what ACC and BWT need scored, by the pool's evaluator."""

    def __init__(self, pool: PoolAnalysis, meter: Meter, on_step: Callable[[], Any]) -> None:
        self._own = pool.workbench.evaluator  # which has encoded the prompts already
        super().__init__(self._own.taskpool, pool.workbench.fabric.device)
        self._pool, self._meter, self._on_step = pool, meter, on_step

    def report(self, model: nn.Module, tasks: Sequence[str], *, others: bool = False) -> Report:
        self._meter.see(tasks[-1], model, self._pool.load(tasks[-1]))
        self._on_step()
        last = len(tasks) == len(self._pool.tasks)
        return self._own.report(model, tasks if last else tasks[-1:])


def measure_run(
    pool: PoolAnalysis, result: Analysis, folder: Path, label: str, on_step: Callable[[], Any] = lambda: None
) -> None:
    """Put the losses of a finished run, from its checkpoints, into ``result``.

    Raises:
        ValueError: the folder is no run with every step's checkpoint, or a run of other models; names them.
    """
    run = _manifest(folder)
    order, inputs = run["order"], run["inputs"]
    if sorted(order) != sorted(pool.tasks):
        raise ValueError(f"'{folder}' is a run of {', '.join(order)}, and the model pool has {', '.join(pool.tasks)}")
    for name in ("_pretrained_", *order):
        model = pool.pretrained if name == "_pretrained_" else pool.load(name)
        if inputs[name].get("sha256") != model_digest(model):
            raise ValueError(f"'{folder}' is a run of other models: '{name}' has other weights there")
    meter = Meter(
        label,
        pool.layers,
        pool.views,
        pool.weights,
        pool.moments,
        _ranks(run["settings"]),
        bounds=not result.losses,
        inputs=pool.few_inputs(),
        model=pool.pretrained,
    )
    merged = copy.deepcopy(pool.pretrained)
    for step, task in enumerate(order):
        load_checkpoint(merged, folder / "checkpoints" / f"merged_model_{step}")
        meter.see(task, merged, pool.load(task))
        on_step()
    result.losses += meter.rows
    if (
        scores := read_json(folder / "accuracy_matrix.json", Scores, advice="the run can score its steps again")
    ) is not None:
        result.scores[label] = {"ACC": scores["ACC"], "BWT": scores["BWT"]}


def check_runs(folders: Sequence[Path]) -> dict[Path, str]:
    """Labels of runs, which are the names of their methods; those of the folders where two are of one method.

    Raises:
        ValueError: a folder is no run with the checkpoints of all its steps; names it.
    """
    names = [_manifest(folder)["method"] for folder in folders]
    return {
        folder: name if names.count(name) == 1 else folder.name for folder, name in zip(folders, names, strict=True)
    }


def _manifest(folder: Path) -> Manifest:
    """The first step's, once all steps are there."""
    steps = folder / "checkpoints"
    if not (steps / "merged_model_0").is_dir():
        raise ValueError(
            f"'{folder}' is no log directory of a run with its checkpoints (there is no {steps / 'merged_model_0'}): "
            "run with method.save_on_every_step=true"
        )
    first = read_whole_checkpoint(steps / "merged_model_0")
    count = len(first["order"])
    if lost := [step for step in range(count) if not (steps / f"merged_model_{step}").is_dir()]:
        raise ValueError(f"'{folder}' lacks the checkpoint of step {lost[0] + 1} of {count}: is the run finished?")
    return first


def _ranks(config: dict[str, Any]) -> FusionConfig:
    """The method's ranks r_p and r_v, as numbers or shares of the width; those of NUFILT where it has none."""
    known = {key: config[key] for key in ("null_rank", "task_rank") if is_number(config.get(key))}
    return FusionConfig(**known)
