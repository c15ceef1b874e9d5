"""`nufilt analyze`: the paper's measures besides accuracy."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fusion_bench_nufilt.analysis.settings import MOMENTS, AnalysisConfig
from fusion_bench_nufilt.merge.folders import refuse_inside
from fusion_bench_nufilt.merge.plan import Plan
from fusion_bench_nufilt.pages.analysis import AnalysisSummary
from fusion_bench_nufilt.pages.write import write_results
from fusion_bench_nufilt.utils.files import (
    expanded,
    lock_folder,
    printable,
    read_json,
    refuse_foreign,
)
from fusion_bench_nufilt.utils.overrides import with_config_dir, without_method

from .terminal import (
    AsJson,
    ConfigDir,
    Quiet,
    bars_on,
    name_files,
    only_log_of,
    options_from,
    patterns,
    raise_failures,
    terminal,
    typed_values,
    warn,
    was_typed,
)

without_data = partial(typer.Option, rich_help_panel="Folders, without data")

NEED_DATA = ("modelpool", "config_dir", "methods", "samples", "activations", "seed")


@options_from(AnalysisConfig)
def analyze(
    context: typer.Context,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Further arguments of fusion_bench."),
    ] = None,
    modelpool: Annotated[
        str, typer.Option(help="Models and their data, as fusion_bench names them.")
    ] = "nufilt_demo",
    config_dir: ConfigDir = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods to measure, as in nufilt compare, or none. By default NUFILT and its "
            "ablations, with ranks in proportion to the width, and the data-free methods of the "
            "paper.",
        ),
    ] = None,
    base: Annotated[
        str | None, without_data(help="The pretrained model: a folder or hub name.")
    ] = None,
    task: Annotated[
        list[str] | None, without_data(help="A fine-tuned model or LoRA adapter; repeat it.")
    ] = None,
    merged: Annotated[str | None, without_data(help="The model merged so far.")] = None,
    verify: Annotated[
        bool,
        without_data(
            help="Refuse another base than that of --merged, a --merged that was changed, and a "
            "task that is in it or comes twice."
        ),
    ] = True,
    target_modules: Annotated[
        list[str] | None,
        typer.Option(
            help="Layers to analyse, as in nufilt merge; by default those that are merged."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("outputs/analysis"),
    as_json: AsJson = False,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Show why a merge works: affinity of data and task vectors, what methods move, where task
    vectors collide.

    Model pools are analysed on their task pool's data; --base and --task analyse weights of
    checkpoint folders alone.
    """
    with terminal(quiet) as console:
        out = expanded(out)
        config = AnalysisConfig(**typed_values(context, options))
        targets = patterns(target_modules) or "auto"
        from fusion_bench_nufilt.analysis.folders import analyze_folders
        from fusion_bench_nufilt.analysis.summary import save_analysis

        refuse_foreign(out, "analysis.json", [MOMENTS])
        # Defaults are always there, and only what was typed can be in vain.
        typed = [name for name in context.params if was_typed(context, name)]
        _refuse_ignored(typed, list(overrides or ()))
        words = with_config_dir(config_dir, overrides or ())
        plan = None
        if base is not None:
            plan = _plan(console, base, task or [], merged, targets, verify)
        if plan is not None:
            refuse_inside(plan, out)
        # Another program's file of that name would be overwritten, with what lies beside it.
        read_json(out / "analysis.json", AnalysisSummary, "name a new or an empty folder")
        lock = lock_folder(out)
        try:
            if plan is not None:
                with bars_on(console)(total=len(plan.layers), desc="Analysing layers") as bar:
                    analysis = analyze_folders(plan, config.task_rank, bar.update)
            else:
                analysis = _pool(console, methods, words, modelpool, config, out, targets)
            content, files = save_analysis(analysis, out)
            files += write_results(out)
        finally:
            lock.release()
        print(json.dumps(content) if as_json else "\n".join(map(printable, content["reading"])))
        name_files(console, out, files)
        # The last lines, since all that succeeded is to be saved and shown.
        failures = content.get("failures", {})
        raise_failures([f"{label}: {reason}" for label, reason in failures.items()])


def _refuse_ignored(typed: list[str], overrides: list[str]) -> None:
    folders = [word for word in overrides if expanded(word).is_dir()]
    if folders:
        base, *tasks = folders
        command = " ".join([f"--base {base}", *(f"--task {task}" for task in tasks)])
        raise ValueError(f"'{base}' is a folder: folders are named by options, {command}")
    if ("base" in typed) != ("task" in typed):
        raise ValueError(
            "--base and --task go together: name the pretrained model and at least one task"
        )
    for name in ("merged", "verify"):
        if name in typed and "base" not in typed:
            raise ValueError(f"--{name} goes with --base and --task")
    ignored = [f"--{name.replace('_', '-')}" for name in NEED_DATA if name in typed]
    ignored += overrides
    if "base" in typed and ignored:
        raise ValueError(
            f"{ignored[0]} does not go with --base, which analyses folders without data: leave it "
            "out"
        )


def _plan(
    console: Console,
    base: str,
    tasks: list[str],
    merged: str | None,
    targets: str | list[str],
    verify: bool,
) -> Plan:
    from fusion_bench_nufilt.merge.planning import plan_merge
    from fusion_bench_nufilt.methods.options import Settings, TargetConfig

    # The number matters only in a merge.
    settings = Settings(step=2 if merged else None, verify=verify)
    target_config = TargetConfig(target_modules=targets)
    plan = plan_merge(base, tasks, merged, targets=target_config, settings=settings)
    warn(console, plan.warnings)
    return plan


def _pool(
    console: Console, methods: str | None, overrides: list[str], modelpool: str, *analysis: Any
) -> Any:
    """Analyse a model pool, and methods on it."""
    from fusion_bench_nufilt.analysis.measure import DEFAULT_METHODS, measure_methods
    from fusion_bench_nufilt.analysis.pool import PoolAnalysis
    from fusion_bench_nufilt.compare.configs import compose_run, quiet
    from fusion_bench_nufilt.compare.experiment import Experiment
    from fusion_bench_nufilt.compare.specs import parse_methods

    words = [f"modelpool={modelpool}", *overrides]
    only_log_of("analysis")
    with quiet():
        pool = PoolAnalysis(Experiment(compose_run(without_method(words))), modelpool, *analysis)
        console.print(pool.memory_note)
        specs = []
        if methods != "none":
            specs = parse_methods(methods or DEFAULT_METHODS, overrides)
        bars = bars_on(console)
        with bars(total=len(pool.tasks), desc="Analysing tasks") as bar:
            result = pool.run(bar.update)
        with bars(total=len(pool.tasks) * len(specs), desc="Measuring methods") as bar:
            measure_methods(pool, result, specs, words, bar.update)
    return result
