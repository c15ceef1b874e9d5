"""Runs every method on every seed."""

import gc
import logging
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import lightning
import torch
from omegaconf import DictConfig
from rich.console import Console

from fusion_bench_nufilt.continual.report import summary
from fusion_bench_nufilt.continual.stream import Evaluate

from .configs import compose_run, make_method, plain
from .display import progress_bars, quiet, steps_bar
from .specs import RunSpec, check_specs
from .store import Run, Store
from .summary import Comparison, MethodResult
from .workbench import Workbench, score_references

log = logging.getLogger(__name__)

Runs = dict[tuple[RunSpec, int], Run]  # by method and seed


def compare(
    modelpool: str,
    specs: Sequence[RunSpec],
    seeds: Sequence[int],
    out: Path,
    *,
    overrides: Sequence[str] = (),
    evaluate: Evaluate = "every_step",
    overwrite: bool = False,
    preset: str | None = None,
    console: Console | None = None,
) -> Comparison:
    """Run every method on every seed, keeping every finished pair in ``out``; what is there already is not run again.

    A pair that fails is kept with its reason, and tried again the next time; the others go on.

    Args:
        modelpool: the models, as in ``fusion_bench modelpool=…``.
        specs: the methods.
        seeds: of the task order, and of all that is drawn.
        out: folder of the results.
        overrides: further ones of `fusion_bench`, for all methods; a method's own settings win over them.
        evaluate: what to score, see :func:`fusion_bench_nufilt.continual.tasks_to_score`.
        overwrite: delete what ``out`` holds and start again.
        preset: kept in the result, for its pictures.
        console: where progress is shown, if it is a terminal. It must hold on to its stream: ``sys.stderr`` is
            silenced meanwhile.

    Raises:
        ValueError: ``out`` holds results of other settings, or nothing can be scored.
    """
    check_specs(specs)
    if evaluate not in get_args(Evaluate):
        raise ValueError(f"evaluate must be one of {', '.join(get_args(Evaluate))}, got '{evaluate}'")
    if wrong := [override for override in overrides if override.startswith(("method=", "modelpool="))]:
        raise ValueError(f"'{wrong[0]}': the methods and the model pool are chosen by options of their own")
    everywhere = [f"modelpool={modelpool}", *overrides]
    workbench = Workbench(compose_run([o for o in everywhere if not o.lstrip("+~").startswith("method.")]))
    settings = {
        "modelpool": modelpool,
        "overrides": list(overrides),
        "evaluate": evaluate,
        "resolved": workbench.settings,
    }
    store = Store(out, settings, overwrite=overwrite)
    runs, configs = _known_runs(store, specs, seeds, [*_protocol(evaluate), *everywhere])

    with quiet(), progress_bars(console) as progress:
        tasks = workbench.tasks
        if (references := store.load_references()) is None:
            with steps_bar(progress, "scoring the single models", 1 + len(tasks)) as on_step:
                references = score_references(workbench, on_step)
            store.save_references(references)
        overall = progress.add_task("", total=len(specs) * len(seeds), completed=len(runs))
        for (spec, seed), config in configs.items():
            progress.update(overall, description=f"{spec.label}, seed {seed}")
            with steps_bar(progress, "step", len(tasks)) as on_step:
                run = _run(workbench, config, seed, on_step)
            store.save(spec, run)
            runs[spec, seed] = run
            log.info("%s, seed %d: %s", spec.label, seed, summary(run.matrix) if run.matrix else run.error)
            progress.advance(overall)
    methods = [MethodResult(spec, [runs[spec, seed] for seed in seeds]) for spec in specs]
    return Comparison(settings, tasks, list(seeds), references, methods, preset)


def _protocol(evaluate: Evaluate) -> list[str]:
    """Every run loads its models once only, and keeps none."""
    return [f"++method.evaluate={evaluate}", "++method.save_on_every_step=false", "++method.check_models=false"]


def _known_runs(
    store: Store, specs: Sequence[RunSpec], seeds: Sequence[int], overrides: Sequence[str]
) -> tuple[Runs, dict[tuple[RunSpec, int], dict[str, Any]]]:
    """What need not be run (it is there, or its configuration is wrong), and the configurations of what must be.

    All methods of a seed come before the next seed, so that what is interrupted has some seeds whole.
    """
    runs: Runs = {}
    configs: dict[RunSpec, dict[str, Any]] = {}
    for spec in specs:
        try:
            configs[spec] = plain(compose_run([*overrides, *spec.overrides]).method)
        except ValueError as error:
            log.warning("%s: %s", spec.label, error)
            runs |= {(spec, seed): Run(seed, {}, {}, error=str(error)) for seed in seeds}
    missing = {}
    for seed in seeds:
        for spec, config in configs.items():
            seeded = {**config, "seed": seed}
            if (run := store.load(spec, seed, seeded)) is not None:
                runs[spec, seed] = run
            else:
                missing[spec, seed] = seeded
    return runs, missing


def _run(workbench: Workbench, config: dict[str, Any], seed: int, on_step: Callable[[int], Any]) -> Run:
    """Merge the stream with one method on one seed; if it fails, that is the result."""
    about = (seed, config, workbench.environment)
    try:
        lightning.seed_everything(seed, verbose=False)  # some methods draw from the global generators
        algorithm = make_method(DictConfig(config), workbench.fabric)
        algorithm.run(workbench.modelpool, workbench.evaluator, on_step=on_step)
        return Run(*about, algorithm.matrix, algorithm.merge_seconds)
    except Exception as error:
        return Run(*about, error=_reason(error), traceback=traceback.format_exc())
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _reason(error: Exception) -> str:
    """In one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
