"""Runs every method on every seed."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, get_args

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import Progress

from fusion_bench_nufilt.compare.overrides import key_of, without_method
from fusion_bench_nufilt.continual.stream import Evaluate
from fusion_bench_nufilt.results.matrix import summary

from .cluster import run_on_cluster
from .configs import compose_run, make_method, plain
from .display import progress_bars, quiet, steps_bar
from .pairs import Configs, Pair, reason, run_pair, run_side_by_side
from .specs import RunSpec, check_specs
from .store import Run, Store
from .summary import Comparison, MethodResult
from .workbench import Workbench, score_references

log = logging.getLogger(__name__)

Runs = dict[Pair, Run]


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
    jobs: int = 1,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
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
        jobs: how many runs at a time, each in a process of its own with its own models and data, and with a GPU of
            its own if there are so many.
        engine: local is this machine; ray is a Ray cluster, with a run at a time on every GPU, or on every node of one
            without.
        address: of the cluster; None: the one that this machine belongs to.
        console: where progress is shown, if it is a terminal. It must hold on to its stream: ``sys.stderr`` is
            silenced meanwhile.

    Raises:
        ValueError: ``out`` holds results of other settings, nothing can be scored, or a process of several was killed.
    """
    check_specs(specs)
    if evaluate not in get_args(Evaluate):
        raise ValueError(f"evaluate must be one of {', '.join(get_args(Evaluate))}, got '{evaluate}'")
    if wrong := [override for override in overrides if key_of(override) in ("method", "modelpool")]:
        raise ValueError(f"'{wrong[0]}': the methods and the model pool are chosen by options of their own")
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if engine == "ray" and jobs > 1:
        raise ValueError(f"jobs={jobs} is for engine=local: a Ray cluster has as many as it has GPUs or nodes")
    everywhere = [f"modelpool={modelpool}", *overrides]
    pools = without_method(everywhere)
    workbench = Workbench(compose_run(pools))
    settings = {
        "modelpool": modelpool,
        "overrides": list(overrides),
        "evaluate": evaluate,
        "resolved": workbench.settings,
    }
    store = Store(out, settings, overwrite=overwrite)
    with closing(store), quiet(), progress_bars(console) as progress:
        runs, configs = _known_runs(store, specs, seeds, [*_protocol(evaluate), *everywhere], workbench)
        tasks = workbench.tasks
        if (references := store.load_references()) is None:
            with steps_bar(progress, "scoring the single models", 1 + len(tasks)) as on_step:
                references = score_references(workbench, on_step)
            store.save_references(references)
        overall = progress.add_task("", total=len(specs) * len(seeds), completed=len(runs))
        if engine == "ray":
            done = run_on_cluster(configs, pools, address)
        else:
            done = _one_by_one(workbench, configs, progress) if jobs == 1 else run_side_by_side(configs, jobs, pools)
        for (spec, seed), run in done:
            store.save(spec, run)
            runs[spec, seed] = run
            log.info("%s, seed %d: %s", spec.label, seed, summary(run.matrix) if run.matrix else run.error)
            progress.advance(overall)
    methods = [MethodResult(spec, [runs[spec, seed] for seed in seeds]) for spec in specs]
    return Comparison(settings, tasks, list(seeds), references, methods, preset)


def _one_by_one(workbench: Workbench, configs: Configs, progress: Progress) -> Iterator[tuple[Pair, Run]]:
    for (spec, seed), config in configs.items():
        with steps_bar(progress, f"{spec.label}, seed {seed}", len(workbench.tasks)) as on_step:
            run = run_pair(workbench, config, seed, on_step)
        yield (spec, seed), run


def _protocol(evaluate: Evaluate) -> list[str]:
    """Every run loads its models once only, and keeps none."""
    return [f"++method.evaluate={evaluate}", "++method.save_on_every_step=false", "++method.check_models=false"]


def _known_runs(
    store: Store, specs: Sequence[RunSpec], seeds: Sequence[int], overrides: Sequence[str], workbench: Workbench
) -> tuple[Runs, dict[Pair, dict[str, Any]]]:
    """What need not be run (it is there, or its configuration is wrong), and the configurations of what must be.

    All methods of a seed come before the next seed, so that what is interrupted has some seeds whole.

    Raises:
        ValueError: there is no method that can be built.
    """
    runs: Runs = {}
    configs: dict[RunSpec, dict[str, Any]] = {}
    wrong: dict[str, str] = {}
    for spec in specs:
        try:
            config = plain(compose_run([*overrides, *spec.overrides]).method)
            make_method(DictConfig(config), workbench.fabric)
            configs[spec] = config
        except Exception as error:  # whatever a method's constructor raises
            wrong[spec.label] = reason(error)
            log.warning("%s: %s", spec.label, wrong[spec.label])
            runs |= {(spec, seed): Run(seed, {}, {}, error=wrong[spec.label]) for seed in seeds}
    if not configs:
        raise ValueError("\n".join(f"{label}: {why}" for label, why in wrong.items()))
    missing = {}
    for seed in seeds:
        for spec, config in configs.items():
            seeded = {**config, "seed": seed}
            if (run := store.load(spec, seed, seeded)) is not None:
                runs[spec, seed] = run
            else:
                missing[spec, seed] = seeded
    return runs, missing
