"""Run every method on every seed, and keep the runs in one folder."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

from tqdm.auto import tqdm

from fusion_bench_nufilt.continual.algorithm import task_order
from fusion_bench_nufilt.continual.models import reason
from fusion_bench_nufilt.methods.options import Evaluate
from fusion_bench_nufilt.pages.content import Comparison, Json, References, SeedRun
from fusion_bench_nufilt.utils.cluster import (
    Results,
    Work,
    connect,
    find_slots,
    run_locally,
    run_on_cluster,
)
from fusion_bench_nufilt.utils.overrides import key_of, without_method

from .configs import compose_run, plain, quiet
from .experiment import Experiment, run_alone
from .specs import RunSpec, check_specs
from .store import Store
from .summary import compare_runs

log = logging.getLogger(__name__)

Engine = Literal["local", "ray"]
Bars = Callable[..., tqdm]
"""What makes a progress bar, given tqdm's own arguments."""
_NO_BARS: Bars = partial(tqdm, disable=True)
#: A run loads each model once, and saves none.
ONE_RUN = tuple(f"++method.{key}=false" for key in ("save_on_every_step", "check_models"))


def compare(
    modelpool: str,
    specs: Sequence[RunSpec],
    seeds: Sequence[int],
    out: Path,
    *,
    overrides: Sequence[str] = (),
    evaluate: Evaluate = "every_step",
    overwrite: bool = False,
    keep_going: bool = False,
    preset: str | None = None,
    validation: bool | None = None,
    jobs: int = 1,
    engine: Engine = "local",
    address: str | None = None,
    bars: Bars = _NO_BARS,
) -> Comparison:
    """Run every method on every seed, except for finished runs kept in ``out``; a run that failed
    is repeated.

    Args:
        modelpool: the models, as in ``fusion_bench modelpool=…``.
        seeds: each determines the task order and all random draws.
        out: the folder of the results.
        overrides: of `fusion_bench`, for all methods; a method's own settings win over them.
        evaluate: what to score, as
            :func:`fusion_bench_nufilt.continual.evaluation.tasks_to_score` says.
        overwrite: delete what ``out`` holds and start again.
        keep_going: if a method cannot be built, report the reason and run the others.
        preset: the preset that the methods come from, if any; the pictures depend on it.
        validation: score a fifth of each task's test data, always the same; False: the rest; None:
            all.
        jobs: runs at a time, each in a process with its own models and data; GPUs are shared out in
            turn. A script that asks for several calls this below ``if __name__ == "__main__":``,
            since each process imports it.
        engine: local is this machine; ray is a Ray cluster, with a run on every GPU, or on every
            node if it has none.
        address: the address of the cluster; None: the one that this machine belongs to.
        bars: makes the progress bars; their stream must be given, since ``sys.stderr`` is silenced.

    Raises:
        ValueError: a method cannot be built, ``out`` holds other settings or models, nothing can be
            scored, or a run's process has other models or data than this one.
    """
    _check(specs, overrides, jobs, engine)
    everywhere = [f"modelpool={modelpool}", *overrides]
    pools = tuple(without_method(everywhere))
    with quiet():
        experiment = Experiment(compose_run(pools), validation)
        experiment.settings  # noqa: B018 -- the test data are loaded before any model
        # Of two words for one key Hydra takes the later one: a method's own settings come last.
        words = [f"++method.evaluate={evaluate}", *ONE_RUN, *everywhere]
        configs, errors = _configure(specs, words, experiment, keep_going)
        settings = {"evaluate": evaluate, "resolved": experiment.settings}
        about = {
            "modelpool": modelpool,
            "overrides": list(overrides),
            "composed": experiment.composed,
        }
        # After all methods were built: --overwrite deletes nothing for a run that can't begin.
        with closing(Store(out, settings, about=about, overwrite=overwrite)) as store:
            references = _score_single_models(store, experiment, bars)
            runs, missing = _known_runs(store, seeds, configs, experiment)
            for spec, error in errors.items():
                for seed in seeds:
                    runs[spec, seed] = SeedRun({}, error=error)
            work = {name: (config,) for name, (_, config) in missing.items()}
            if engine == "local" and jobs == 1:
                results = _run_here(work, experiment, bars)
            else:
                data = (pools, validation, experiment.description)
                results = _run_apart(work, data, jobs, engine, address)
            # Closing ends the processes of runs that are not finished, also after Ctrl-C.
            with closing(results):
                _keep(results, missing, runs, store, bars)
    by_spec: dict[RunSpec, dict[int, SeedRun]] = {}
    for spec in specs:
        by_spec[spec] = {seed: runs[spec, seed] for seed in seeds}
    return compare_runs(store.settings, experiment.tasks, list(seeds), references, by_spec, preset)


def _check(specs: Sequence[RunSpec], overrides: Sequence[str], jobs: int, engine: Engine) -> None:
    check_specs(specs)
    for override in overrides:
        if key_of(override) in ("method", "modelpool"):
            raise ValueError(
                f"'{override}': the methods and the model pool are chosen by options of their own"
            )
    most = 4 * (os.cpu_count() or 1)
    if not 1 <= jobs <= most:
        raise ValueError(
            f"jobs must be at least 1 and at most {most}, four for each core, got {jobs}"
        )
    if engine == "ray" and jobs > 1:
        raise ValueError(
            f"jobs={jobs} is for engine=local: a Ray cluster has as many as it has GPUs or nodes"
        )


def _configure(
    specs: Sequence[RunSpec], overrides: Sequence[str], experiment: Experiment, keep_going: bool
) -> tuple[dict[RunSpec, Json], dict[RunSpec, str]]:
    """Return the configurations of the methods that can be built, and why others, if allowed,
    can't.
    """
    configs = {}
    errors = {}
    for spec in specs:
        try:
            config = plain(compose_run([*overrides, *spec.overrides]).method)
            experiment.make_method(config)
            configs[spec] = config
        except Exception as error:  # whatever a method's constructor raises
            errors[spec] = reason(error)
    if errors and not (keep_going and configs):
        lines = [f"{spec.label}: {error}" for spec, error in errors.items()]
        raise ValueError("\n".join(lines))
    return configs, errors


def _score_single_models(store: Store, experiment: Experiment, bars: Bars) -> References:
    """Score the single models, or return the kept scores; refuse a store of other models."""
    references = store.load_references(experiment.tasks)
    if references is None:
        total = 1 + len(experiment.tasks)
        with bars(desc="scoring the single models", total=total, leave=False) as bar:
            references = experiment.score_single_models(lambda *_: bar.update())
    # Before anything is written: the models may be others than those of the results there.
    store.identify(experiment.digests)
    store.save_references(references)
    return references


def _known_runs(
    store: Store, seeds: Sequence[int], configs: Mapping[RunSpec, Json], experiment: Experiment
) -> tuple[dict[tuple[RunSpec, int], SeedRun], dict[str, tuple[RunSpec, Json]]]:
    """Return the kept runs, and by name the methods and configurations of the missing ones."""
    runs = {}
    missing = {}
    # Seed by seed, so that an interrupted comparison has some seeds whole.
    for seed, spec in product(seeds, configs):
        config = {**configs[spec], "seed": seed}
        order = task_order(experiment.tasks, shuffle=config["shuffle_order"], seed=seed)
        run = store.load(spec, config, order)
        if run is None:
            missing[f"{spec.label}, seed {seed}"] = (spec, config)
        else:
            runs[spec, seed] = run
    return runs, missing


def _run_here(work: Work, experiment: Experiment, bars: Bars) -> Results:
    for name, (config,) in work.items():
        with bars(desc=name, total=len(experiment.tasks), leave=False) as bar:
            run = experiment.run(config, lambda *_, bar=bar: bar.update())
        yield name, run


def _run_apart(
    work: Work, data: tuple[Any, ...], jobs: int, engine: Engine, address: str | None
) -> Results:
    if engine == "local":
        return run_locally(work, partial(run_alone, *data), jobs)
    ray = connect(address)
    has_gpus = ray.cluster_resources().get("GPU", 0) >= 1
    slots = find_slots(ray, gpus=has_gpus, whole_nodes=True)
    return run_on_cluster(ray, slots, work, partial, run_alone, *data)


def _keep(
    results: Results,
    missing: Mapping[str, tuple[RunSpec, Json]],
    runs: dict[tuple[RunSpec, int], SeedRun],
    store: Store,
    bars: Bars,
) -> None:
    """Save each run as it ends, and add it to ``runs``."""
    with bars(total=len(runs) + len(missing), initial=len(runs), desc="Comparing") as bar:
        for name, run in results:
            spec, config = missing[name]
            runs[spec, config["seed"]] = run
            store.save(spec, run)
            log.info("%s: %s", name, run.matrix.summary() if run.matrix else run.error)
            bar.update()
