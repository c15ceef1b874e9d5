"""The checks that a merge must pass before anything large is read."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from typing_extensions import TypedDict

from fusion_bench_nufilt.core import FusionConfig
from fusion_bench_nufilt.core.spectral import SpectralConfig
from fusion_bench_nufilt.layers import TargetConfig, coverage
from fusion_bench_nufilt.storage.files import MANIFEST
from fusion_bench_nufilt.storage.json_files import Count, read_json
from fusion_bench_nufilt.storage.tensors import FLOATS

from .architecture import Architecture, Layer, by_slot
from .checkpoint import Checkpoint, is_adapter, some
from .methods import Method, SavedVotes, make_method
from .models import FullModel, LoraAdapter, Task, open_task
from .plan import Plan, Settings

STATE = "nufilt_state"
# A fine-tuned model stays close to its base; models trained apart have a cosine of about zero.
_LEAST_COSINE, _MOST_CHANGE, _SAMPLED_LAYERS, _SAMPLED_ELEMENTS = 0.9, 0.5, 8, 2**20


class Manifest(TypedDict, total=False):
    """What is read of the manifest of a merged model."""

    step: Count
    tasks: list[str]
    settings: dict[str, Any]
    votes: SavedVotes


def plan_merge(
    base: str,
    tasks: Sequence[str],
    merged: str | None = None,
    config: FusionConfig | SpectralConfig | None = None,
    targets: TargetConfig | None = None,
    settings: Settings | None = None,
) -> Plan:
    """Check all that headers tell, and a few samples of the weights where they are on this disk.

    Args:
        base: folder or hub name of the pretrained model.
        tasks: folders or hub names of fine-tuned models or peft LoRA adapters, in merging order.
        merged: folder or hub name of what is merged so far; default: nothing yet.
        config: the method's settings, which say the method.
        targets: which layers are merged, and what happens to the rest.
        settings: how folders are merged.

    Raises:
        ValueError: names the model and the tensor that do not fit, and what to do.
    """
    config, targets, settings = config or FusionConfig(), targets or TargetConfig(), settings or Settings()
    if not tasks:
        raise ValueError("there is no task to merge")
    if settings.step not in (None, 1) and merged is None:
        raise ValueError(f"step {settings.step} needs the merged model that holds the tasks before it: name it")
    theta_0 = Checkpoint.open(base)
    if is_adapter(theta_0.folder):
        raise ValueError(f"the base '{base}' is an adapter: name the model that it was trained on")
    architecture = Architecture(theta_0)
    whole = FullModel(theta_0, architecture)
    layers = architecture.layers(theta_0, targets.target_modules, targets.exclude_modules)
    chosen = {layer.slot for layer in layers}
    theta_0.check_floats(key for layer in layers for key in layer.keys)
    theta_0.small_files()
    covered = coverage(architecture.model, {layer.name: layer.view for layer in layers}, targets)
    so_far = None if merged is None else FullModel(_open_merged(merged), architecture)
    models = [open_task(task, architecture) for task in tasks]
    manifest = (so_far and read_json(so_far.checkpoint.folder / MANIFEST, Manifest)) or {}
    names, votes = [layer.name for layer in layers], manifest.get("votes", {})
    method = make_method(config, settings.seed, names, merged, votes)
    warnings = [] if so_far is None else _check_merged(whole, so_far, manifest, method, targets, settings)
    if twice := _given_twice(models):
        warnings.append(f"{some(twice)} comes more than once in the stream")
    warnings += [covered.warning] if covered.warning else []
    for model in models:
        warnings += _check_shapes(architecture, whole, model, chosen, targets)
        if targets.other_params == "pretrained" and isinstance(model, LoraAdapter):
            outside = [slot for slot in model.pairs if slot not in chosen]
            warnings += [f"adapter '{model.checkpoint.name}' also changes {some(outside)}: ignored"] if outside else []
    first_step = _first_step(settings, so_far, manifest)
    others = {slot: tuple(keys) for slot, keys in by_slot(architecture, theta_0).items() if slot not in chosen}
    changed = targets.other_params == "mean" or (targets.other_params == "first" and first_step == 1)
    floats = {slot for slot, keys in others.items() if theta_0.tensors[keys[0]].dtype in FLOATS}
    averaged = floats if changed else set()
    if so_far is not None:
        so_far.checkpoint.check_floats(so_far.keys[slot] for slot in chosen | floats)
    for model in models:
        model.checkpoint.check_floats(key for slot, key in model.keys.items() if slot in chosen | averaged)
        if isinstance(model, FullModel) and (absent := sorted(averaged - model.keys.keys())):
            warnings.append(f"'{model.checkpoint.name}' is left out of the mean of {some(absent)}")
    kept = None if so_far is None else so_far.checkpoint.folder / STATE  # the merged layers in float32
    state = None
    if kept is not None and kept.is_dir():
        if settings.accumulate == "float32":
            state = FullModel(Checkpoint.from_folder(str(kept), kept), architecture)
            _check_state(state, whole)
        else:
            warnings.append(f"'{merged}' has the merged layers in float32; --accumulate float32 goes on from there")
    plan = Plan(
        base=theta_0,
        merged=so_far,
        state=state,
        tasks=models,
        method=method,
        targets=targets,
        settings=settings,
        origin=architecture.origin,
        layers=layers,
        coverage=covered,
        others=others,
        averaged=averaged,
        first_step=first_step,
        history=list(manifest.get("tasks", [])),
        warnings=warnings,
    )
    if method.exact:
        _check_exact(plan)
    elif plan.keeps_state and manifest and not chosen <= (state.keys.keys() if state else set()):
        warnings.append(f"'{merged}' does not have all merged layers in float32: going on from the rounded ones")
    _check_memory(plan)
    warnings += check_relation(plan)
    return plan


def check_relation(plan: Plan) -> list[str]:
    """Warnings, with the evidence, where samples of the weights say that a model was not made from the base."""
    if plan.base.remote:
        return []
    here = [model for model in plan.models if isinstance(model, FullModel) and not model.checkpoint.remote]
    return [text for model in here for text in _relation(plan.base, model, plan.layers)]


def _open_merged(name: str) -> Checkpoint:
    checkpoint = Checkpoint.open(name)
    if is_adapter(checkpoint.folder):
        raise ValueError(f"the merged model '{name}' is an adapter: give it as a --task")
    return checkpoint


def _check_shapes(
    architecture: Architecture, base: FullModel, model: FullModel | Task, chosen: set[str], targets: TargetConfig
) -> list[str]:
    """Shapes and keys of one model against the base's; what deserves a warning."""
    name, adapter = model.checkpoint.name, isinstance(model, LoraAdapter)
    kept = []
    for slot, shape in model.slots.items():
        parts = architecture.parts(slot)  # of a tensor that was not split, since it has another shape
        expected = architecture.shape(slot) if parts else base.slots.get(slot)
        if expected is None:
            if adapter and slot not in model.keys:
                raise ValueError(f"adapter '{name}' is for another base: '{base.checkpoint.name}' has no '{slot}'")
        elif shape != expected:
            outside = chosen.isdisjoint([slot, *parts])
            if not outside or targets.on_shape_mismatch == "error":
                hint = "; --on-shape-mismatch keep-base leaves it as it is in the base" if outside else ""
                raise ValueError(
                    f"model '{name}', tensor '{slot}': shape {shape} differs from {expected} of the base "
                    f"'{base.checkpoint.name}': it comes from another base, or its vocabulary was changed{hint}"
                )
            kept.append(slot)
    for slot in kept:
        model.ignore(slot)
    lost = [slot for slot in base.slots if slot in chosen and slot not in model.slots]
    if adapter and len(lost) == len(chosen):
        raise ValueError(
            f"adapter '{name}' changes none of the {len(chosen)} layers to merge, only {some(model.slots)}"
        )
    if lost and not adapter:
        shape = base.slots[lost[0]]
        raise ValueError(f"model '{name}' lacks layer '{lost[0]}' {shape} of the base, one of {len(lost)}")
    warnings = [f"'{name}': kept from the base because of their shape: {some(kept)}"] if kept else []
    if extra := [slot for slot in model.slots if slot not in base.slots]:
        warnings.append(f"'{name}' has {len(extra)} tensors that the base lacks, ignored: {some(extra)}")
    return warnings


def _check_merged(
    base: FullModel,
    merged: FullModel,
    manifest: Manifest,
    method: Method,
    targets: TargetConfig,
    settings: Settings,
) -> list[str]:
    """The merged model must be the base's equal in keys and shapes; changed settings deserve a warning."""
    name = merged.checkpoint.name
    for slot, shape in base.slots.items():
        if merged.slots.get(slot) != shape:
            raise ValueError(
                f"the merged model '{name}' was not made from the base '{base.checkpoint.name}': '{slot}' is "
                f"{merged.slots.get(slot)} there and {shape} in the base"
            )
    options = {**dataclasses.asdict(method.config), **dataclasses.asdict(targets), "seed": settings.seed}
    now = json.loads(json.dumps({"method": method.name, **options}))
    before = manifest.get("settings", {})
    changed = [f"{key} was {before[key]!r}, is {now[key]!r}" for key in now if before.get(key, now[key]) != now[key]]
    return [f"settings differ from those that '{name}' was made with: {'; '.join(changed)}"] if changed else []


def _check_state(state: FullModel, base: FullModel) -> None:
    """The layers that an earlier merge kept must be float32 matrices of the base's shapes."""
    name = state.checkpoint.name
    for slot, shape in state.slots.items():
        dtype = state.checkpoint.tensors[state.keys[slot]].dtype
        if dtype != "F32" or shape != base.slots.get(slot):
            raise ValueError(
                f"'{name}', tensor '{slot}': {dtype} {shape} is not float32 {base.slots.get(slot)}, as the base's "
                "layer would be; remove that folder if the weights beside it are right"
            )


def _check_exact(plan: Plan) -> None:
    """What was merged must be there in float32 at least, for a method that reads its state off the weights."""
    narrow = [layer for layer in plan.layers if plan.dtype(layer.keys[0]).itemsize < 4]
    if not narrow:
        return
    what = f"{plan.method.name} reads what was merged off the weights, and '{narrow[0].name}' is too coarse for it in "
    what += f"{plan.dtype(narrow[0].keys[0])}"
    if not plan.keeps_state:
        raise ValueError(f"{what}: --accumulate float32 keeps the merged layers in float32 beside the model")
    kept = plan.state.keys.keys() if plan.state else set()
    if plan.merged is not None and any(layer.slot not in kept for layer in narrow):
        name = plan.merged.checkpoint.name
        raise ValueError(
            f"{what}; '{name}' does not have it in float32: merge with --accumulate float32 from the start"
        )


def _given_twice(tasks: Sequence[Task]) -> list[str]:
    """Names of tasks that lie in the folder of an earlier one, however that was spelled."""
    folders = [task.checkpoint.folder.resolve() for task in tasks]
    return [task.checkpoint.name for i, task in enumerate(tasks) if folders[i] in folders[:i]]


def _first_step(settings: Settings, merged: FullModel | None, manifest: Manifest) -> int:
    if settings.step is not None or merged is None:
        return settings.step or 1
    if "step" not in manifest:
        raise ValueError(
            f"'{merged.checkpoint.name}' has no {MANIFEST} that tells how many tasks it holds: say with --step which "
            "number the new one has"
        )
    return manifest["step"] + 1


def _check_memory(plan: Plan) -> None:
    needed = plan.process_memory + max(map(plan.layer_memory, plan.layers))
    if plan.settings.max_memory is not None and needed > plan.settings.max_memory:
        raise ValueError(
            f"max_memory of {plan.settings.max_memory / 1e9:.2f} GB is below the {needed / 1e9:.2f} GB that "
            "the largest layer needs by itself"
        )


def _relation(base: Checkpoint, model: FullModel, layers: Sequence[Layer]) -> list[str]:
    chosen = layers[:: max(1, len(layers) // _SAMPLED_LAYERS)][:_SAMPLED_LAYERS]
    xx = yy = xy = dd = 0.0
    for layer in chosen:
        key, info = layer.keys[0], base.tensors[layer.keys[0]]
        count = min(info.numel, _SAMPLED_ELEMENTS)
        theta_0 = base.file(key).elements(info, 0, count)
        theta = model.elements(layer.slot, 0, count, theta_0)
        if theta is None:
            continue
        x, y = theta_0.double(), theta.double()
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
