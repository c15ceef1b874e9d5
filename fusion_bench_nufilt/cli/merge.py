"""`nufilt merge`: its options, of which help is made; what it does is in :mod:`.merging`."""

import gc
from itertools import chain
from typing import Annotated, Any

import typer

from fusion_bench_nufilt.methods.options import METHOD_TABLE, Settings, TargetConfig
from fusion_bench_nufilt.utils.garbage import garbage_left
from fusion_bench_nufilt.utils.heap import keep_freed_memory

from .terminal import AsJson, Quiet, options_from, terminal, typed_values

_OF_METHODS = dict.fromkeys(entry.Options for entry in METHOD_TABLE.values())
KINDS = (*_OF_METHODS, TargetConfig, Settings)
#: The options that most merges need, which stand first, with those in the signature.
_COMMON = ("target_modules", "device")
#: The options for which some methods have defaults of their own.
_VARIED = set(chain.from_iterable(entry.defaults for entry in METHOD_TABLE.values()))


@options_from(*KINDS, varied=_VARIED, common=_COMMON)
def merge(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE|KEY=VALUE",
            help="RECIPE: a YAML file with base, tasks, out and settings; options win over it. "
            "KEY=VALUE: another way to write an option, such as null_rank=64.",
        ),
    ] = None,
    base: Annotated[str | None, typer.Option(help="Pretrained model: folder or hub name.")] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task", help="Fine-tuned model or peft LoRA adapter; repeat it for a stream."
        ),
    ] = None,
    merged: Annotated[
        str | None,
        typer.Option(help="The merged model to add to; its base and settings are taken over."),
    ] = None,
    out: Annotated[str | None, typer.Option(help="Folder of the result.")] = None,
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"One of {', '.join(METHOD_TABLE)}. All but nufilt and nufilt/… keep sums over "
            "the tasks, whose order then does not matter; by default they merge all linear layers "
            "and average the rest.",
            autocompletion=lambda: list(METHOD_TABLE),
        ),
    ] = "nufilt",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, print the plan and stop.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **typed: Any,
) -> None:
    """Merge fine-tuned models into one, layer by layer, without loading a model."""
    # Before torch, which starts threads.
    keep_freed_memory()
    with terminal(quiet) as console:
        # Torch takes two seconds, for which help does not wait.
        with garbage_left():
            from .merging import run

            # Else the search that comes next goes through all that was imported.
            gc.freeze()
        typed |= {"base": base, "tasks": tasks, "merged": merged, "out": out, "method": method}
        run(console, words or (), typed_values(context, typed), dry_run=dry_run, as_json=as_json)
