"""`nufilt merge`: checkpoint folders of any size."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fusion_bench_nufilt.core.options import split_options
from fusion_bench_nufilt.folders import Plan, Settings, merge_folders, plan_merge
from fusion_bench_nufilt.folders.engine import cluster_nodes
from fusion_bench_nufilt.folders.forecast import disk_bytes, peak_memory, predict_seconds
from fusion_bench_nufilt.folders.merge import check_disk, check_output
from fusion_bench_nufilt.folders.models import LoraAdapter
from fusion_bench_nufilt.folders.output import work_folder
from fusion_bench_nufilt.layers import TargetConfig
from fusion_bench_nufilt.methods import METHODS, find_method

from .options import as_bytes, takes_options, typed_values
from .recipe import MODELS, gather
from .terminal import interruptible, shown, terminal

KINDS = (*dict.fromkeys(method.Options for method in METHODS.values()), TargetConfig, Settings)
_model_option = partial(typer.Option, rich_help_panel="Models")


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
    base: Annotated[str | None, _model_option(help="Pretrained model: folder or hub name.")] = None,
    tasks: Annotated[
        list[str] | None,
        _model_option("--task", help="Fine-tuned model or peft LoRA adapter; repeat it for a stream."),
    ] = None,
    merged: Annotated[str | None, _model_option(help="What is merged so far, to add to it.")] = None,
    out: Annotated[str | None, _model_option(help="Folder to make.")] = None,
    method: Annotated[
        Literal[tuple(METHODS)],  # type: ignore[valid-type]
        typer.Option(
            help="spectral is a method of ours, not the paper's, which merges all linear layers and averages the rest "
            "unless target_modules and other_params say otherwise.",
            rich_help_panel="Method",
        ),
    ] = "nufilt",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, print the plan, stop.")] = False,
    **typed: Any,
) -> None:
    """Merge fine-tuned models into one, layer by layer, without loading a model."""
    with terminal() as console:
        typed |= {"base": base, "tasks": tasks, "merged": merged, "out": out, "method": method}
        known = ["method", *(field.name for kind in KINDS for field in fields(kind))]
        plan, folder = _plan(gather(words or (), typed_values(context, typed), known))
        _print_plan(console, plan, folder)
        if not dry_run:
            _run(console, plan, folder)
        elif not check_output(plan, folder):
            check_disk(plan, folder)


def _plan(recipe: dict[str, Any]) -> tuple[Plan, Path]:
    """Return the plan of a recipe, and the folder to make."""
    if recipe.get("max_memory") is not None:
        recipe["max_memory"] = as_bytes(recipe["max_memory"])
    method = recipe.pop("method", "nufilt")
    kind = find_method(method)
    options, models = split_options((kind.Options, TargetConfig, Settings), {**kind.targets, **recipe})
    if foreign := [name for name in models if name not in MODELS]:
        raise ValueError(f"'{foreign[0]}' is not an option of method={method}")
    plan = plan_merge(models["base"], models["tasks"], models.get("merged"), *options, method=method)
    return plan, Path(models["out"]).expanduser()  # the shell leaves the ~ of --out=~/merged as it is


def _run(console: Console, plan: Plan, out: Path) -> None:
    """Carry out a plan with a bar of its progress."""
    columns = (TextColumn("Merging"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=console, disable=not console.is_terminal)
    with interruptible(console, str(work_folder(out))), bars:
        bar = bars.add_task("", total=None)
        merge_folders(plan, out, lambda done, total: bars.update(bar, completed=done, total=total))
    console.print(f"[bold]{shown(str(out))}[/bold]: step {plan.last_step}, {len(plan.layers)} layers merged")


def _print_plan(console: Console, plan: Plan, out: Path) -> None:
    """Print what will be done and what it takes."""
    table = Table(show_header=False, box=None, title="Plan", title_justify="left")
    for key, value in [*_contents(plan), *_costs(plan, out)]:
        table.add_row(key, shown(value))
    console.print(table)
    for warning in plan.warnings:
        console.print(f"[yellow]warning:[/yellow] {shown(warning)}", highlight=False, soft_wrap=True)


def _contents(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the rows about the models, and about what becomes of the tensors."""
    yield "base", plan.base.name
    if plan.merged is not None:
        exact = plan.state is not None and plan.method.state_is_weight
        yield "merged so far", f"{plan.merged.checkpoint.name}{', layers in float32' if exact else ''}"
    for number, task in enumerate(plan.tasks, plan.first_step):
        kind = "LoRA adapter" if isinstance(task, LoraAdapter) else "model"
        yield f"step {number}", f"{task.checkpoint.name} ({kind})"
    layers, averaged = plan.layers, len(plan.averaged)
    yield "merged", f"{len(layers)} layers, {layers[0].name} … {layers[-1].name} (known from {plan.origin})"
    yield "", f"{plan.coverage.merged[1]:.1%} of all elements"
    if plan.coverage.left_out:
        yield "not merged", f"matrices in blocks: {plan.coverage.names_left_out}"
    yield "averaged", f"{averaged} tensors (other_params={plan.targets.other_params})"
    yield "copied", f"{len(plan.others) - averaged} tensors, bit by bit"


def _costs(plan: Plan, out: Path) -> Iterator[tuple[str, str]]:
    """Yield the rows about what the merge takes."""
    workers, cpus = plan.settings.workers, ""
    if plan.settings.engine == "local":
        yield "memory", f"{peak_memory(plan) / 1e9:.2f} GB at most"
    else:
        counts = Counter(node.slots for node in cluster_nodes(plan))
        workers, cpus = sum(number * each for each, number in counts.items()), " if all CPUs are like this machine's"
        for each, number in counts.items():
            held = f"{peak_memory(plan, each) / 1e9:.2f} GB at most"
            yield "workers", f"{number}, each on {each} batches of layers at a time in {held}"
    yield "disk", f"{disk_bytes(plan) / 1e9:.2f} GB in {out}"
    if plan.settings.on_cpu:
        yield "time", f"about {_duration(predict_seconds(plan, workers))}{cpus}"


def _duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours, in as few digits as an estimate has."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = seconds / 60
    return f"{minutes:.2g} min" if minutes < 90 else f"{minutes / 60:.2g} h"
