"""The `nufilt` command."""

import dataclasses
import inspect
import logging
import re
import sys
from collections.abc import Callable, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fusion_bench_nufilt.core import FusionConfig
from fusion_bench_nufilt.core.options import choices, split_options
from fusion_bench_nufilt.folders.plan import Settings
from fusion_bench_nufilt.layers import TargetConfig

_Command = TypeVar("_Command", bound=Callable[..., None])

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(stderr=True)


def _takes_options(*kinds: type) -> Callable[[_Command], _Command]:
    """Give a command, which takes ``**options``, the fields of dataclasses for its options."""

    def decorate(command: _Command) -> _Command:
        parameters = list(inspect.signature(command).parameters.values())[:-1]
        for each in (each for kind in kinds for each in dataclasses.fields(kind)):
            kind, default = _as_typed(each)
            info = typer.Option(help=each.metadata["help"], rich_help_panel=each.metadata["panel"])
            parameters.append(
                Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])
            )
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _as_typed(option: dataclasses.Field[Any]) -> tuple[Any, Any]:
    """Type and default of an option as it is typed on the command line."""
    if values := choices(option):
        words = tuple(str(value).lower() if isinstance(value, bool) else value for value in values)
        return Literal[words], words[values.index(option.default)]
    if option.name == "max_memory":
        return str | None, None
    if Sequence[str] in get_args(option.type):
        return list[str] | None, None
    return option.type, option.default


@app.callback()
def main() -> None:
    """Null-space filtering (NUFILT): merge checkpoints of any size, compare merging methods."""


@app.command()
@_takes_options(FusionConfig, TargetConfig, Settings)
def merge(
    base: Annotated[str, typer.Option(help="Pretrained model: folder or hub name.", rich_help_panel="Models")],
    task: Annotated[
        list[str],
        typer.Option(help="Fine-tuned model or peft LoRA adapter; repeat it for a stream.", rich_help_panel="Models"),
    ],
    out: Annotated[Path, typer.Option(help="Folder to make.", rich_help_panel="Models")],
    merged: Annotated[
        str | None, typer.Option(help="What is merged so far, to add to it.", rich_help_panel="Models")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, print the plan, stop.", rich_help_panel="Machine")
    ] = False,
    **options: Any,
) -> None:
    """Merge fine-tuned models into one, layer by layer, without loading a model."""
    _log_to(console)
    try:
        from fusion_bench_nufilt.folders import merge_folders, plan_merge
        from fusion_bench_nufilt.folders.preflight import check_disk, check_output

        for key in ("target_modules", "exclude_modules"):
            options[key] = _patterns(options[key])
        options["target_modules"] = options["target_modules"] or "auto"
        options["null_space"] = {"true": True, "false": False}.get(options["null_space"], options["null_space"])
        options["max_memory"] = _bytes(options["max_memory"])
        (config, targets, settings), _ = split_options([FusionConfig, TargetConfig, Settings], options)
        plan = plan_merge(base, task, merged, config, targets, settings)
        _print_plan(plan, out)
        if dry_run:
            if not check_output(plan, out):
                check_disk(plan, out)
            return
        columns = (TextColumn("Merging"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=len(plan.layers) + len(plan.others))
            merge_folders(plan, out, lambda done, total: progress.update(bar, completed=done, total=total))
        console.print(f"[bold]{escape(str(out))}[/bold]: step {plan.last_step}, {len(plan.layers)} layers merged")
    except (ValueError, OSError) as error:
        raise _failed(error) from None


@app.command()
def compare(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Further arguments of fusion_bench.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="[LABEL=]NAME[:KEY=VALUE]..., separated by commas; all: NUFILT and the data-free baselines."),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Methods of the paper: ablation, sensitivity or paper.")] = None,
    modelpool: Annotated[str, typer.Option(help="Models, as fusion_bench names them.")] = "nufilt_demo",
    seeds: Annotated[str, typer.Option(help="Task orders: 42, 42,45 or 42:52 (42 to 51, the paper's ten).")] = "42",
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("outputs/compare"),
    evaluate: Annotated[
        str, typer.Option(help="every_step, diagonal (enough for ACC and BWT) or last (ACC only).")
    ] = "every_step",
    jobs: Annotated[int, typer.Option(help="Runs at a time, each in a process of its own.")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete what OUT holds and start again.")] = False,
) -> None:
    """Compare continual merging methods over task orders: tables, pictures and all numbers in one folder.

    Finished runs are kept: the same command goes on where it was interrupted, and methods and seeds can be added.
    """
    terminal = Console(file=sys.stderr)  # the one of now: while methods run, what they print is silenced
    _log_to(terminal)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("fusion_bench_nufilt.compare").setLevel(logging.INFO)
    try:
        from fusion_bench_nufilt import compare as room
        from fusion_bench_nufilt.continual.report import fits_terminal, print_table

        words = list(overrides or ())
        specs = room.parse_methods(methods, room.Methods(words)) if methods else []
        specs += room.preset_specs(preset, modelpool, words) if preset else []
        comparison = room.compare(
            modelpool,
            specs,
            room.parse_seeds(seeds),
            out,
            overrides=words,
            evaluate=evaluate,  # type: ignore[arg-type]
            overwrite=overwrite,
            preset=preset,
            jobs=jobs,
            console=terminal,
        )
        files = room.save_report(comparison, out)
    except (ValueError, OSError) as error:  # a hub out of reach is an OSError
        raise _failed(error) from None
    except KeyboardInterrupt:
        terminal.print(f"interrupted: what is finished is kept in {out}; the same command goes on", highlight=False)
        raise typer.Exit(130) from None
    main = room.main_table(comparison)
    per_task = room.as_rich(room.task_table(comparison))
    if fits_terminal(per_task):  # else it is in per_task.md
        print_table(per_task)
    print_table(room.as_rich(main))
    print("\n".join(main.notes))
    terminal.print(f"[bold]{out}[/bold]: {', '.join(files)}", highlight=False)
    if not comparison.finished:
        raise typer.Exit(1)


def _log_to(console: Console) -> None:
    handler = RichHandler(console=console, show_path=False, show_time=False)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])


def _failed(error: Exception) -> typer.Exit:
    """Say what was wrong; to be raised."""
    console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
    return typer.Exit(1)


def _patterns(words: list[str] | None) -> str | list[str] | None:
    """One word that is special or a regular expression by itself; plain words are a list, as in the YAML."""
    if not words:
        return None
    if len(words) == 1 and (words[0] in ("auto", "all-linear") or re.search(r"[\\*+?()\[\]|^$]", words[0])):
        return words[0]
    return words


def _bytes(size: str | None) -> int | None:
    """``4GB``, ``500MB``, ``4GiB`` or a plain number of bytes."""
    if size is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", size.strip().lower())
    if not match:
        raise ValueError(f"max_memory must be a size such as 4GB, got '{size}'")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " "))


def _print_plan(plan: Any, out: Path) -> None:
    """What will be done and what it takes."""
    from fusion_bench_nufilt.folders.models import LoraAdapter

    table = Table(show_header=False, box=None, title="Plan", title_justify="left")
    table.add_row("base", escape(plan.base.name))
    if plan.merged is not None:
        name = escape(plan.merged.checkpoint.name)
        table.add_row("merged so far", f"{name}{', layers in float32' if plan.state else ''}")
    for number, task in enumerate(plan.tasks, plan.first_step):
        kind = "LoRA adapter" if isinstance(task, LoraAdapter) else "model"
        table.add_row(f"step {number}", f"{escape(task.checkpoint.name)} ({kind})")
    first, last = plan.layers[0].name, plan.layers[-1].name
    table.add_row("merged", f"{len(plan.layers)} linear layers, {first} … {last} (known from {plan.origin})")
    table.add_row("averaged", f"{len(plan.averaged)} tensors (other_params={plan.targets.other_params})")
    table.add_row("copied", f"{plan.copied} tensors, bit by bit")
    table.add_row("memory", f"{plan.memory / 1e9:.2f} GB at most")
    table.add_row("disk", f"{plan.disk / 1e9:.2f} GB in {escape(str(out))}")
    if plan.on_cpu:
        table.add_row("time", f"about {max(1, round(plan.predict_seconds() / 60))} min")
    console.print(table)
    for warning in plan.warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(app())
