"""`nufilt compare`: compare methods over task orders."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fusion_bench_nufilt.utils.files import expanded, refuse_foreign
from fusion_bench_nufilt.utils.overrides import with_config_dir

from .terminal import (
    AsJson,
    ConfigDir,
    Quiet,
    bars_on,
    interruptible,
    name_files,
    only_log_of,
    raise_failures,
    terminal,
)


def compare(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Further arguments of fusion_bench."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="[LABEL=]NAME[:KEY=VALUE]..., with commas; all, the default: NUFILT and every "
            "method that needs no data; order_free: the methods that keep sums over the tasks."
        ),
    ] = None,
    preset: Annotated[
        Literal["ablation", "sensitivity", "ranks", "paper", "overhead"] | None,
        typer.Option(help="The paper's methods."),
    ] = None,
    with_data: Annotated[
        bool, typer.Option("--with-data", help="Add the preset's methods that need data.")
    ] = False,
    validation: Annotated[
        bool | None, typer.Option(help="Score a fifth of the test data only, or the rest.")
    ] = None,
    modelpool: Annotated[
        str, typer.Option(help="Models, as fusion_bench names them.")
    ] = "nufilt_demo",
    config_dir: ConfigDir = None,
    seeds: Annotated[
        str, typer.Option(help="Task orders: 42, 42,45 or 42:52 (42 to 51, the paper's ten).")
    ] = "42",
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("outputs/compare"),
    evaluate: Annotated[
        Literal["last", "diagonal", "every_step", "every_step_all"],
        typer.Option(
            help="What is scored: last is enough for ACC, diagonal for BWT, too, every_step_all "
            "for the mean zero-shot score."
        ),
    ] = "every_step",
    jobs: Annotated[
        int, typer.Option(help="Runs at a time, each in its own process, with the GPUs in turn.")
    ] = 1,
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option(help="local, or ray: a run on every GPU, or on every node, of a cluster."),
    ] = "local",
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster; by default this machine's.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete what OUT holds and start again.")
    ] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="If a method cannot be built, run the others.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare continual merging methods over task orders: tables, pictures and all numbers in one
    folder.

    Finished runs are kept: the same command goes on where it was interrupted, and methods and seeds
    can be added.
    """
    out = expanded(out)
    with terminal(quiet) as console:
        only_log_of("compare")
        words = with_config_dir(config_dir, overrides or ())
        from fusion_bench_nufilt.compare import configs, run, specs, summary
        from fusion_bench_nufilt.pages import comparison

        refuse_foreign(out, "compare.json")
        method_specs = _specs(methods, preset, with_data, modelpool, words)
        loggers = configs.make_trackers(words, out)
        with interruptible(console, str(out)):
            results = run.compare(
                modelpool,
                method_specs,
                specs.parse_seeds(seeds),
                out,
                bars=bars_on(console),
                overrides=[word for word in words if not configs.is_tracker(word)],
                evaluate=evaluate,
                overwrite=overwrite,
                keep_going=keep_going,
                preset=preset,
                validation=validation,
                jobs=jobs,
                engine=engine,
                address=address,
            )
        files = summary.save_comparison(results, out)
        summary.log_comparison(results, loggers)
        if as_json:
            print(json.dumps(results.as_json()))
        else:
            comparison.print_comparison(results)
        name_files(console, out, files)
        # The last line, since all that succeeded is to be saved and shown.
        raise_failures(_failures(results))


def _failures(results: Any) -> list[str]:
    """Return a line for each reason why a method failed."""
    failures = []
    for label, method in results.methods.items():
        for reason, seeds in method.failures.items():
            failures.append(f"{label}, seed {', '.join(map(str, seeds))}: {reason}")
    return failures


def _specs(
    methods: str | None, preset: str | None, with_data: bool, modelpool: str, words: list[str]
) -> list[Any]:
    from fusion_bench_nufilt.compare.presets import preset_specs
    from fusion_bench_nufilt.compare.specs import parse_methods

    if with_data and not preset:
        raise ValueError(
            "--with-data goes with --preset paper or overhead; name other such methods with "
            "--methods"
        )
    if "taskpool=dummy" in words:
        raise ValueError(
            "taskpool=dummy scores nothing, and a comparison is of scores: leave it out or name "
            "another"
        )
    specs: list[Any] = []
    if methods or not preset:
        specs += parse_methods(methods or "all", words)
    if preset:
        specs += preset_specs(preset, modelpool, words, with_data=with_data)
    return specs
