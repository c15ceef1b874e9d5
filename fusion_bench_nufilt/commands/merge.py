"""`nufilt merge`: checkpoint folders of any size."""

from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fusion_bench_nufilt.core import FusionConfig
from fusion_bench_nufilt.core.options import split_options
from fusion_bench_nufilt.core.spectral import SpectralConfig
from fusion_bench_nufilt.folders import Plan, Settings, merge_folders, plan_merge
from fusion_bench_nufilt.folders.destination import check_disk, check_output
from fusion_bench_nufilt.folders.models import LoraAdapter
from fusion_bench_nufilt.folders.output import work_folder
from fusion_bench_nufilt.folders.ray_engine import places
from fusion_bench_nufilt.layers import TargetConfig

from .options import as_bytes, takes_options, typed_values
from .recipe import MODELS, gather
from .terminal import interruptible, shown, terminal

METHODS: dict[str, type] = {"nufilt": FusionConfig, "spectral": SpectralConfig}
# What spectral accumulation was measured with; it is not NUFILT's default, which is the paper's.
DEFAULTS = {"spectral": {"target_modules": "all-linear", "other_params": "mean"}}
KINDS = (*METHODS.values(), TargetConfig, Settings)


@takes_options(*KINDS)
def merge(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE|KEY=VALUE",
            help="RECIPE is a YAML file with base, tasks, out and settings, or the nufilt.json of a result; options "
            "win over it. KEY=VALUE is another way to write an option, such as null_rank=64.",
        ),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Pretrained model: folder or hub name.", rich_help_panel="Models")
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            help="Fine-tuned model or peft LoRA adapter; repeat it for a stream.",
            rich_help_panel="Models",
        ),
    ] = None,
    merged: Annotated[
        str | None, typer.Option(help="What is merged so far, to add to it.", rich_help_panel="Models")
    ] = None,
    out: Annotated[str | None, typer.Option(help="Folder to make.", rich_help_panel="Models")] = None,
    method: Annotated[
        Literal["nufilt", "spectral"],
        typer.Option(
            help="spectral is a method of ours, not the paper's, which merges all linear layers and averages the rest "
            "unless target_modules and other_params say otherwise.",
            rich_help_panel="Method",
        ),
    ] = "nufilt",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, print the plan, stop.")] = False,
    **options: Any,
) -> None:
    """Merge fine-tuned models into one, layer by layer, without loading a model."""
    with terminal() as console:
        typed = typed_values(
            context, {"base": base, "tasks": tasks, "merged": merged, "out": out, "method": method, **options}
        )
        recipe = gather(words or (), typed, ["method", *(field.name for kind in KINDS for field in fields(kind))])
        if recipe.get("max_memory") is not None:
            recipe["max_memory"] = as_bytes(recipe["max_memory"])
        (config, targets, settings), models = settings_of(recipe)
        plan = plan_merge(models["base"], models["tasks"], models.get("merged"), config, targets, settings)
        folder = Path(models["out"]).expanduser()  # the shell leaves the ~ of --out=~/merged as it is
        _print_plan(console, plan, folder)
        if dry_run:
            if not check_output(plan, folder):
                check_disk(plan, folder)
            return
        columns = (TextColumn("Merging"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        quiet = not console.is_terminal
        with (
            interruptible(console, str(work_folder(folder))),
            Progress(*columns, console=console, disable=quiet) as bars,
        ):
            bar = bars.add_task("", total=len(plan.layers) + len(plan.others))
            merge_folders(plan, folder, lambda done, total: bars.update(bar, completed=done, total=total))
        console.print(f"[bold]{shown(str(folder))}[/bold]: step {plan.last_step}, {len(plan.layers)} layers merged")


def settings_of(recipe: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The settings of the recipe's method, of its targets and of folders; and the models.

    Raises:
        ValueError: there is no such method, or an option is another method's.
    """
    method = recipe.pop("method", "nufilt")
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    settings, models = split_options((METHODS[method], TargetConfig, Settings), DEFAULTS.get(method, {}) | recipe)
    if foreign := [name for name in models if name not in MODELS]:
        raise ValueError(f"'{foreign[0]}' is not an option of method={method}")
    return settings, models


def _print_plan(console: Console, plan: Plan, out: Path) -> None:
    """What will be done and what it takes."""
    table = Table(show_header=False, box=None, title="Plan", title_justify="left")
    table.add_row("base", shown(plan.base.name))
    if plan.merged is not None:
        name = shown(plan.merged.checkpoint.name)
        table.add_row("merged so far", f"{name}{', layers in float32' if plan.state else ''}")
    for number, task in enumerate(plan.tasks, plan.first_step):
        kind = "LoRA adapter" if isinstance(task, LoraAdapter) else "model"
        table.add_row(f"step {number}", f"{shown(task.checkpoint.name)} ({kind})")
    layers = shown(f"{plan.layers[0].name} … {plan.layers[-1].name}")
    table.add_row("merged", f"{len(plan.layers)} layers, {layers} (known from {shown(plan.origin)})")
    table.add_row("", f"{plan.coverage.merged[1]:.1%} of all elements")
    if plan.coverage.left_out:
        table.add_row("not merged", f"matrices in blocks: {shown(plan.coverage.names_left_out)}")
    table.add_row("averaged", f"{len(plan.averaged)} tensors (other_params={plan.targets.other_params})")
    table.add_row("copied", f"{plan.copied} tensors, bit by bit")
    local = plan.settings.engine == "local"
    slots = plan.workers
    if local:
        table.add_row("memory", f"{plan.memory / 1e9:.2f} GB at most")
    else:
        workers = Counter(place.slots for place in places(plan))
        slots = sum(number * each for each, number in workers.items())
        for each, number in workers.items():
            held = f"{plan.memory_of(each) / 1e9:.2f} GB at most"
            table.add_row("workers", f"{number}, each on {each} batches of layers at a time in {held}")
    table.add_row("disk", f"{plan.disk / 1e9:.2f} GB in {shown(str(out))}")
    if plan.on_cpu:
        seconds = plan.predict_seconds() * plan.workers / slots
        table.add_row(
            "time", f"about {_duration(seconds)}{'' if local else ' if all CPUs are like those of this machine'}"
        )
    console.print(table)
    for warning in plan.warnings:
        console.print(f"[yellow]warning:[/yellow] {shown(warning)}", highlight=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = seconds / 60
    return f"{minutes:.2g} min" if minutes < 90 else f"{minutes / 60:.2g} h"
