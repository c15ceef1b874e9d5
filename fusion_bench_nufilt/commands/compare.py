"""`nufilt compare`: methods and task orders side by side."""

import logging
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from .terminal import interruptible, terminal


def compare(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Further arguments of fusion_bench.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="[LABEL=]NAME[:KEY=VALUE]..., separated by commas; all means NUFILT and the data-free baselines, and "
            "is what is compared if nothing else is said."
        ),
    ] = None,
    preset: Annotated[
        Literal["ablation", "sensitivity", "paper", "overhead"] | None, typer.Option(help="Methods of the paper.")
    ] = None,
    with_data: Annotated[
        bool, typer.Option("--with-data", help="With --preset paper: also the methods that need data.")
    ] = False,
    modelpool: Annotated[str, typer.Option(help="Models, as fusion_bench names them.")] = "nufilt_demo",
    seeds: Annotated[str, typer.Option(help="Task orders: 42, 42,45 or 42:52 (42 to 51, the paper's ten).")] = "42",
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("outputs/compare"),
    evaluate: Annotated[
        Literal["last", "diagonal", "every_step", "every_step_all"],
        typer.Option(help="What is scored: last is enough for ACC, diagonal for BWT, too, every_step_all for FWT."),
    ] = "every_step",
    jobs: Annotated[int, typer.Option(help="Runs at a time, each in a process, and on a GPU, of its own.")] = 1,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="local, or ray: a run on every GPU, or on every node, of a cluster.")
    ] = "local",
    address: Annotated[str | None, typer.Option(help="Address of the Ray cluster; default: this machine's.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete what OUT holds and start again.")] = False,
) -> None:
    """Compare continual merging methods over task orders: tables, pictures and all numbers in one folder.

    Finished runs are kept: the same command goes on where it was interrupted, and methods and seeds can be added.
    """
    out = out.expanduser()  # the shell leaves the ~ of --out=~/results as it is
    with terminal() as console:
        options = {"evaluate": evaluate, "overwrite": overwrite, "jobs": jobs, "engine": engine, "address": address}
        words = list(overrides or ())
        comparison, files = _compare(words, methods, preset, with_data, modelpool, seeds, out, console, options)
    from fusion_bench_nufilt.results.comparison import print_comparison

    print_comparison(out)
    console.print(f"[bold]{out}[/bold]: {', '.join(files)}", highlight=False)
    if not comparison.finished:
        raise typer.Exit(1)


def _compare(
    words: list[str],
    methods: str | None,
    preset: str | None,
    with_data: bool,
    modelpool: str,
    seeds: str,
    out: Path,
    console: Console,
    options: dict[str, Any],
) -> tuple[Any, list[str]]:
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("fusion_bench_nufilt.compare").setLevel(logging.INFO)
    from fusion_bench_nufilt.compare.configs import is_tracker, make_trackers
    from fusion_bench_nufilt.compare.presets import preset_specs
    from fusion_bench_nufilt.compare.run import compare as run_comparison
    from fusion_bench_nufilt.compare.specs import parse_methods, parse_seeds

    if not preset:
        methods = methods or "all"
    specs = parse_methods(methods, words) if methods else []
    if preset:
        specs += preset_specs(preset, modelpool, words, with_data=with_data)
    elif with_data:
        raise ValueError("--with-data goes with --preset paper; name other methods that need data with --methods")
    loggers = make_trackers(words, out)
    others = [word for word in words if not is_tracker(word)]
    with interruptible(console, str(out)):
        comparison = run_comparison(
            modelpool, specs, parse_seeds(seeds), out, overrides=others, preset=preset, console=console, **options
        )
    files = comparison.save(out)
    comparison.log(loggers, [out / file for file in files if file.endswith(".png")])
    return comparison, files
