"""Plan a merge of folders: open the models and check them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fusion_bench_nufilt.methods.options import Settings, TargetConfig
from fusion_bench_nufilt.methods.registry import find_method
from fusion_bench_nufilt.models.door import open_models
from fusion_bench_nufilt.models.layers import Layer
from fusion_bench_nufilt.utils.devices import process_memory, workers_on
from fusion_bench_nufilt.utils.files import size_text
from fusion_bench_nufilt.utils.heap import give_back_freed_memory
from fusion_bench_nufilt.utils.manifest import STATE_FILE
from fusion_bench_nufilt.utils.options import split_options
from fusion_bench_nufilt.utils.tensors import describe

from .adapter_plan import with_adapter
from .checks import (
    check_contents,
    check_merged_manifest,
    check_module_files,
    check_same_base,
    verify_merged,
)
from .kept_state import KeptState
from .layer_jobs import layer_jobs
from .plan import Plan, arrange_files, method_of, small_files_of


def plan_merge(
    base: str | None,
    tasks: Sequence[str],
    merged: str | None = None,
    options: Any = None,
    targets: TargetConfig | None = None,
    settings: Settings | None = None,
    *,
    method: str = "nufilt",
) -> Plan:
    """Plan a merge: check all that headers tell, and samples of the weights that are on this disk.

    Args:
        base: folder or hub name of the pretrained model; None for an adapter, of whose base nothing
            is read but a config.json where it is at hand.
        tasks: folders or hub names of fine-tuned models or peft LoRA adapters, in merging order.
        merged: folder or hub name of the model to merge into; by default, the base.
        options: the method's options; by default its own defaults.
        targets: which layers are merged, and what happens to the rest; by default, the method's
            choice.
        settings: how folders are merged.
        method: the method's name in :data:`fusion_bench_nufilt.methods.METHODS`.

    Raises:
        ValueError: there is no such method, or a model does not fit; the message names it and says
            what to do.
    """
    # The checks read samples of all models, of which nothing is to stay.
    give_back_freed_memory()
    method_class = find_method(method)
    settings = settings or Settings()
    defaults, _ = split_options((method_class.Options, TargetConfig), method_class.defaults)
    default_options, default_targets = defaults
    options = options or default_options
    targets = targets or default_targets
    if not isinstance(options, method_class.Options):
        raise ValueError(
            f"the options of method {method} are {method_class.Options.__name__}, got "
            f"{type(options).__name__}"
        )
    if not tasks:
        raise ValueError("there is no task to merge")
    if settings.step not in (None, 1) and merged is None:
        raise ValueError(
            f"step {settings.step} needs the merged model that holds the tasks before it: name it"
        )

    if settings.adapter and "o" not in method_class.sides_in_basis:
        raise ValueError(
            f"method {method_class.name} does not say that it merges in a basis of the tasks' "
            "directions (sides_in_basis), without which there is no merge into an adapter: leave "
            "--adapter out, and name the base with --base"
        )
    models = open_models(base, tasks, merged, targets, settings)
    plan = Plan(**vars(models), method=method_of(method_class, options, settings.seed, models))
    plan = with_adapter(plan) if settings.adapter else _with_model(plan)
    state_file = {key: describe(like) for key, like in KeptState(plan).needed().items()}
    if state_file:
        plan = dataclasses.replace(plan, files={**plan.files, STATE_FILE: state_file})
    return dataclasses.replace(plan, warnings=[*plan.warnings, *_check(plan)])


def _with_model(plan: Plan) -> Plan:
    """Return a plan with the files of a whole model."""
    checkpoint = plan.pretrained.checkpoint
    files = arrange_files(plan)
    untied = plan.architecture.may_untie(checkpoint.config)
    small_files = small_files_of(
        plan.vocabulary.files, checkpoint, files, plan.settings.dtype, untied
    )
    return dataclasses.replace(plan, small_files=small_files, files=files)


def _filtered_layers(plan: Plan) -> list[Layer]:
    """Return the layers that a task changes beyond the first one of all, which meets no other."""
    later_tasks = plan.tasks if plan.merged is not None else plan.tasks[1:]
    filtered = []
    for layer in plan.layers:
        # An adapter leaves layers as they are, of which a merge into the base has all the same.
        if any(task.entries[layer.param].rank != 0 for task in later_tasks):
            filtered.append(layer)
    return filtered


def _check(plan: Plan) -> list[str]:
    """Refuse what does not fit, and return warnings about what is doubtful, as do all checks
    here.
    """
    for checkpoint in plan.checkpoints:
        checkpoint.identity()  # what they are now: files that change later are other ones
    warnings = []
    if plan.merged is not None:
        warnings += check_merged_manifest(plan, plan.merged)
    # What adapters leave alone is not left out by the merge.
    if plan.coverage.warning and not plan.is_adapter:
        warnings.append(plan.coverage.warning)
    shapes = [layer.view.shape for layer in _filtered_layers(plan)]
    all_merged = not plan.coverage.left_out
    warning = plan.method.warning(shapes, all_merged=all_merged)
    if warning is not None:
        warnings.append(warning)
    check_contents(plan)
    for task in plan.tasks:
        warnings += check_module_files(plan, task)
    if plan.merged is not None:
        warnings += KeptState(plan).check(plan.merged.source.name)
    warnings += check_same_base(plan)
    _check_memory(plan)
    # The last one, since it reads whole files, and all that others refuse is known by then.
    warnings += verify_merged(plan)
    return warnings


def _check_memory(plan: Plan) -> None:
    """Refuse a ``max_memory`` in which the largest layer has no room."""
    bound = plan.settings.max_memory
    if bound is None:
        return
    largest = max(job.memory for job in layer_jobs(KeptState(plan)))
    needed = process_memory(workers_on(plan.settings.devices)) + largest
    if needed > bound:
        raise ValueError(
            f"max_memory of {size_text(bound)} is below the {size_text(needed)} that the "
            "largest layer needs by itself"
        )
