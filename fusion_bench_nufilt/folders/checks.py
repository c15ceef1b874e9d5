"""The checks that a merge must pass before anything large is read."""

import json
from collections.abc import Sequence

from fusion_bench_nufilt.storage.tensors import FLOATS

from .architecture import Architecture, Layer
from .checkpoint import Checkpoint, some
from .forecast import layer_memory, process_memory
from .manifest import settings as options_of
from .models import FullModel, LoraAdapter, Task
from .plan import Plan

# A fine-tuned model stays close to its base; models trained apart have a cosine of about zero.
_LEAST_COSINE, _MOST_CHANGE = 0.9, 0.5
_SAMPLED_LAYERS, _SAMPLED_ELEMENTS = 8, 2**20


def check_merged(plan: Plan) -> list[str]:
    """Compare the merged model with the base in keys and shapes; return a warning of changed settings.

    Raises:
        ValueError: It was made from another base, or is quantised; the message names the tensor.
    """
    base, merged = plan.models.base, plan.models.merged
    if merged is None:
        return []
    name = merged.checkpoint.name
    for slot, shape in base.slots.items():
        if merged.slots.get(slot) != shape:
            raise ValueError(
                f"the merged model '{name}' was not made from the base '{base.checkpoint.name}': '{slot}' is "
                f"{merged.slots.get(slot)} there and {shape} in the base"
            )
    floats = (slot for slot, key in base.keys.items() if plan.base.tensors[key].dtype in FLOATS)
    merged.checkpoint.check_floats(merged.keys[slot] for slot in floats)
    now, before = json.loads(json.dumps(options_of(plan))), plan.before.get("settings", {})
    compared = [key for key in now if key in before and key not in ("accumulate", "device")]
    changed = [f"{key} was {before[key]!r}, is {now[key]!r}" for key in compared if before[key] != now[key]]
    return [f"settings differ from those that '{name}' was made with: {'; '.join(changed)}"] if changed else []


def check_tasks(plan: Plan, architecture: Architecture) -> list[str]:
    """Compare the tasks with the base; return what deserves a warning.

    Raises:
        ValueError: A task comes from another base, lacks a layer or is quantised; the message names both.
    """
    covered, chosen = plan.selection.coverage, {layer.slot for layer in plan.layers}
    averaged, tasks = plan.selection.averaged, plan.models.tasks
    warnings = [covered.warning] if covered.warning else []
    if twice := _given_twice(tasks):
        warnings.append(f"{some(twice)} comes more than once in the stream")
    for task in tasks:
        name = task.checkpoint.name
        warnings += _check_shapes(plan, task, architecture, chosen)
        _check_layers(plan, task, chosen)
        task.checkpoint.check_floats(key for slot, key in task.keys.items() if slot in chosen | averaged)
        if extra := [slot for slot in task.slots if slot not in plan.models.base.slots]:
            warnings.append(f"'{name}' has {len(extra)} tensors that the base lacks, ignored: {some(extra)}")
        if absent := sorted(slot for slot in averaged if not task.has(slot)):
            warnings.append(f"'{name}' is left out of the mean of {some(absent)}")
        outside = [slot for slot in task.pairs if slot not in chosen] if isinstance(task, LoraAdapter) else []
        if outside and plan.targets.other_params == "pretrained":
            warnings.append(f"adapter '{name}' also changes {some(outside)}: ignored")
    return warnings


def _given_twice(tasks: Sequence[Task]) -> list[str]:
    """Return the names of tasks that lie in the folder of an earlier one, however that was spelled."""
    folders = [task.checkpoint.folder.resolve() for task in tasks]
    return [task.checkpoint.name for i, task in enumerate(tasks) if folders[i] in folders[:i]]


def _check_shapes(plan: Plan, task: Task, architecture: Architecture, chosen: set[str]) -> list[str]:
    """Refuse a task whose tensors have other shapes than the base's, or have it ignore those that may be kept."""
    name, base, kept = task.checkpoint.name, plan.models.base, []
    for slot, shape in task.slots.items():
        parts = architecture.parts(slot)  # of a tensor that was not split, since it has another shape
        expected = architecture.shape(slot) if parts else base.slots.get(slot)
        if expected is None:
            if isinstance(task, LoraAdapter) and slot in task.pairs:
                raise ValueError(f"adapter '{name}' is for another base: '{base.checkpoint.name}' has no '{slot}'")
        elif shape != expected:
            outside = chosen.isdisjoint([slot, *parts])
            if not outside or plan.targets.on_shape_mismatch == "error":
                hint = "; --on-shape-mismatch keep-base leaves it as it is in the base" if outside else ""
                raise ValueError(
                    f"model '{name}', tensor '{slot}': shape {shape} differs from {expected} of the base "
                    f"'{base.checkpoint.name}': it comes from another base, or its vocabulary was changed{hint}"
                )
            kept.append(slot)
    for slot in kept:
        task.ignore(slot)
    return [f"'{name}': kept from the base because of their shape: {some(kept)}"] if kept else []


def _check_layers(plan: Plan, task: Task, chosen: set[str]) -> None:
    """Refuse a model that lacks a layer, and an adapter that changes none."""
    name, shapes = task.checkpoint.name, plan.models.base.slots
    lost = [slot for slot in shapes if slot in chosen and slot not in task.slots]
    if not isinstance(task, LoraAdapter) and lost:
        raise ValueError(f"model '{name}' lacks layer '{lost[0]}' {shapes[lost[0]]} of the base, one of {len(lost)}")
    if len(lost) == len(chosen):
        raise ValueError(f"adapter '{name}' changes none of the {len(lost)} layers to merge, only {some(task.slots)}")


def check_memory(plan: Plan) -> None:
    """Refuse a bound of the memory that is below what the largest layer needs."""
    bound = plan.settings.max_memory
    needed = process_memory(plan.settings.workers) + max(layer_memory(plan, layer) for layer in plan.layers)
    if bound is not None and needed > bound:
        raise ValueError(
            f"max_memory of {bound / 1e9:.2f} GB is below the {needed / 1e9:.2f} GB that the largest layer needs by "
            "itself"
        )


def check_relation(plan: Plan) -> list[str]:
    """Return warnings, with the evidence, where samples of the weights say that a model was not made from the base."""
    models = (plan.models.merged, plan.models.state, *plan.models.tasks)
    here = [model for model in models if isinstance(model, FullModel) and not model.checkpoint.remote]
    return [] if plan.base.remote else [text for model in here for text in _relation(plan.base, model, plan.layers)]


def _relation(base: Checkpoint, model: FullModel, layers: Sequence[Layer]) -> list[str]:
    """Compare some elements of some layers of a model with the base's."""
    chosen = layers[:: max(1, len(layers) // _SAMPLED_LAYERS)][:_SAMPLED_LAYERS]
    xx = yy = xy = dd = 0.0
    for layer in chosen:
        if not model.has(layer.slot):
            continue
        info = base.tensors[layer.keys[0]]
        count = min(info.numel, _SAMPLED_ELEMENTS)
        x = base.file(layer.keys[0]).elements(info, 0, count).double()
        y = model.elements(layer.slot, 0, count, x).double()
        xx, yy, xy, dd = xx + float(x @ x), yy + float(y @ y), xy + float(x @ y), dd + float((y - x) @ (y - x))
    if not xx * yy > 0:
        return []
    cosine, change = xy / (xx * yy) ** 0.5, (dd / xx) ** 0.5
    if cosine < _LEAST_COSINE or change > _MOST_CHANGE:
        return [
            f"'{model.checkpoint.name}' looks as if it was made from another base than '{base.name}': "
            f"over {len(chosen)} layers their weights have cosine {cosine:.3f}, ||tau|| / ||theta_0|| is {change:.2f}"
        ]
    if dd == 0:
        return [f"'{model.checkpoint.name}' does not differ from the base in the {len(chosen)} layers looked at"]
    return []
