"""What each task changed in the base, and which of these changes the result lacks."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from fusion_bench_nufilt.storage.tensors import CHUNK_BYTES, FLOATS

from .output import Record
from .plan import Plan
from .sources.models import FullModel
from .sources.source import some


def changed_by(plan: Plan, param: str) -> list[str]:
    """Return the tasks ("task 0", ...) whose tensor outside the merged layers differs from the
    base's.

    A tensor that a task stores at lower precision differs if it is not the base's, rounded to that
    precision.
    """
    tasks = {
        f"task {number}": task for number, task in enumerate(plan.tasks) if param in task.params
    }
    return [source for source, task in tasks.items() if _differs(plan, param, task)]


def _differs(plan: Plan, param: str, task: FullModel) -> bool:
    """Compare a task's tensor with the base's piece by piece, up to the first difference."""
    if param in task.magnitudes:  # a DoRA changes whole rows
        return True
    base, key = plan.pretrained.checkpoint, plan.pretrained.keys[param]
    info, own = (
        base.tensors[key],
        task.source.tensors[task.keys[param]] if param in task.keys else None,
    )
    if info.dtype not in FLOATS or (own and own.dtype not in FLOATS):
        if own is None or (own.dtype, own.shape) != (info.dtype, info.shape):
            return True
        pieces = zip(
            base.file(key).chunks(info),
            task.checkpoint.file(task.keys[param]).chunks(own),
            strict=True,
        )
        return not all(torch.equal(before, after) for before, after in pieces)
    for start in range(0, numel := math.prod(info.shape), CHUNK_BYTES // 8):
        between = start, min(start + CHUNK_BYTES // 8, numel)
        after = task.elements(param, *between, before := base.elements(key, *between))
        if not torch.equal(before.to(after.dtype), after):
            return True
    return False


def always_lost(plan: Plan, task: FullModel) -> list[str]:
    """Return the tensors of a task that are known before the merge to be missing from its result.

    The base lacks them, ties them to others or has them in another shape, or an adapter changes
    them outside the merged layers.
    """
    merged = {layer.param for layer in plan.layers} | plan.averaged_of(task)
    foreign = (param for param in task.params if param not in plan.pretrained.params)
    untied = (
        key
        for key, param in task.tied.items()
        if param in task.keys and _untied(task, key, task.keys[param])
    )
    outside = (param for param in task.pairs if param in plan.others and param not in merged)
    return [*task.ignored, *foreign, *untied, *outside]


def _untied(task: FullModel, key: str, other: str) -> bool:
    """Tell from a sample whether two tensors that the base ties differ; those still on the hub are
    not compared.
    """
    checkpoint = task.checkpoint
    count = min(
        math.prod(checkpoint.tensors[key].shape),
        math.prod(checkpoint.tensors[other].shape),
        CHUNK_BYTES // 8,
    )
    known = not checkpoint.remote and checkpoint.tensors[key].dtype in FLOATS
    return known and not torch.equal(
        checkpoint.elements(key, 0, count), checkpoint.elements(other, 0, count)
    )


def kept_from_base(plan: Plan) -> list[str]:
    """Return the tensors that stay as in the base although a task has them, too."""
    outside = [param for task in plan.tasks for param in task.keys if param in plan.others]
    averaged = [plan.averaged_of(task) for task in plan.tasks]
    return [
        param for param in dict.fromkeys(outside) if any(param not in each for each in averaged)
    ]


def changes(plan: Plan, records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Return for each task how many tensors it changed, how many of these are merged, and the names
    of the others.
    """
    lost = {f"task {number}": always_lost(plan, task) for number, task in enumerate(plan.tasks)}
    merged = dict.fromkeys(lost, 0)
    for record in records:
        param, steps = (
            record["param"],
            [report["step"] for report in record["reports"] if report["task_norm"]],
        )
        for source in [f"task {step - plan.first_step}" for step in steps]:
            merged[source] += 1
        for source in record.get("changed", ()):
            if param in plan.averaged_of(plan.models[source]):
                merged[source] += 1
            elif param not in lost[source]:
                lost[source].append(param)
    return {
        source: {
            "changed": merged[source] + len(names),
            "merged": merged[source],
            "left_out": names,
        }
        for source, names in lost.items()
    }


def refuse_losses(plan: Plan, records: Iterable[Record]) -> None:
    """Raise a ValueError if, by the records, the result lacks something that a task changed."""
    for source, found in changes(plan, records).items():
        if found["left_out"]:
            what = f"strict: '{plan.models[source].source.name}' changed {some(found['left_out'])}"
            remedy = "merge more (target_modules, other_params), or go on without --strict"
            raise ValueError(f"{what}, which the result would not have: {remedy}")


def account(plan: Plan, found: dict[str, dict[str, Any]]) -> list[str]:
    """Return a sentence for each task: how much of what it changed the result has, and what it
    lacks.
    """
    sentences = []
    for source, counts in found.items():
        lost = f" Left out: {some(counts['left_out'])}." if counts["left_out"] else ""
        merged = f"{counts['merged']} of the {counts['changed']} tensors it changed are merged."
        sentences.append(f"{plan.models[source].source.label}: {merged}{lost}")
    return sentences
