"""Plan a merge: open the models and check them before anything large is read."""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fusion_bench_nufilt.core.options import split_options, with_scope
from fusion_bench_nufilt.layers import TargetConfig, coverage
from fusion_bench_nufilt.layers.models import UNRELATED, leave_out, unrelated
from fusion_bench_nufilt.layers.names import block_of
from fusion_bench_nufilt.methods import LayerMethod, find_method
from fusion_bench_nufilt.storage.checkpoint import STATE_FILE, read_manifest, verify_files
from fusion_bench_nufilt.storage.files import MANIFEST
from fusion_bench_nufilt.storage.schemas import Manifest
from fusion_bench_nufilt.storage.tensors import FLOATS, describe

from .architecture import Architecture
from .changes import refuse_losses
from .forecast import layer_memory, process_memory
from .heads import describe_heads, take_heads
from .layout import check_fp8, small_files_of
from .plan import Plan, Settings, state_tensors
from .sources.checkpoint import Checkpoint, is_adapter, some
from .sources.models import FullModel, LoraAdapter, open_task
from .vocabulary import join_vocabularies

# A fine-tuned model stays close to its base; models trained apart have a cosine of about zero.
_LEAST_COSINE, _MOST_CHANGE = 0.9, 0.5
_SAMPLED_LAYERS, _SAMPLED_ELEMENTS = 8, 2**20
_CHANGED = "merge or fetch it again; --no-verify goes on from it all the same"


def plan_merge(
    base: str,
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
        base: folder or hub name of the pretrained model.
        tasks: folders or hub names of fine-tuned models or peft LoRA adapters, in merging order.
        merged: folder or hub name of the model to merge into; by default, the base.
        options: the method's options; by default its own defaults.
        targets: which layers are merged, and what happens to the rest; by default, the method's choice.
        settings: how folders are merged.
        method: the method's name in :data:`fusion_bench_nufilt.methods.METHODS`.

    Raises:
        ValueError: there is no such method, or a model does not fit; the message names it and says what to do.
    """
    kind, settings = find_method(method), settings or Settings()
    (own, usual), _ = split_options((kind.Options, TargetConfig), kind.defaults)
    options, targets = options or own, targets or usual
    if not isinstance(options, kind.Options):
        raise ValueError(f"the options of method {method} are {kind.Options.__name__}, got {type(options).__name__}")
    if not tasks:
        raise ValueError("there is no task to merge")
    if settings.step not in (None, 1) and merged is None:
        raise ValueError(f"step {settings.step} needs the merged model that holds the tasks before it: name it")
    checkpoint = _open("base", base, "name the model that it was trained on")
    architecture = Architecture(checkpoint)
    pretrained = FullModel(checkpoint, architecture)
    so_far, before, state = _open_merged(merged, architecture, kind, settings)
    opened = _open_tasks(tasks, architecture, settings.weights or [1.0] * len(tasks))
    heads = take_heads(targets.heads, pretrained, opened, architecture, before)
    layers = architecture.layers(checkpoint, targets, heads)
    plan = Plan(
        pretrained=pretrained,
        merged=so_far,
        state=state,
        tasks=opened,
        layers=layers,
        others=architecture.others(checkpoint, layers),
        coverage=coverage(architecture.model, {layer.name: layer.view for layer in layers}, targets),
        origin=architecture.origin,
        method=kind(options, [layer.name for layer in layers], settings.seed),
        targets=targets,
        settings=settings,
        small_files=checkpoint.small_files(),
        heads=describe_heads(heads, pretrained, opened, before),
        head_slots=set(heads.of(pretrained.slots)),
        before=before,
    )
    plan.warnings += _check(plan, architecture)
    plan.small_files = small_files_of(plan.small_files, checkpoint, plan.files, settings.dtype)
    return plan


def _open(what: str, name: str, advice: str) -> Checkpoint:
    checkpoint = Checkpoint.open(name)
    if is_adapter(checkpoint.folder):
        raise ValueError(f"the {what} '{name}' is an adapter: {advice}")
    return checkpoint


def _open_merged(
    name: str | None, architecture: Architecture, kind: type[LayerMethod], settings: Settings
) -> tuple[FullModel | None, Manifest, FullModel | None]:
    """Open the model to merge into, its manifest, and the state beside it, as far as they exist."""
    if name is None:
        return None, Manifest(), None
    merged = _open("merged model", name, "give it as a --task")
    before = read_manifest(merged.folder, _CHANGED, verify=settings.verify) or Manifest()
    keeps = not kind.state_is_weight or settings.accumulate == "float32"
    kept = (merged.folder_with(STATE_FILE) / STATE_FILE).parent if keeps else None
    state = FullModel(Checkpoint.from_folder(str(kept), kept), architecture) if kept and kept.is_dir() else None
    return FullModel(merged, architecture), before, state


def _open_tasks(names: Sequence[str], architecture: Architecture, weights: Sequence[float]) -> list[FullModel]:
    if len(weights) != len(names):
        raise ValueError(f"there are {len(weights)} weights for {len(names)} tasks")
    return [open_task(name, architecture, weight) for name, weight in zip(names, weights, strict=True)]


def _join_vocabularies(plan: Plan, architecture: Architecture) -> Iterator[str]:
    """Enter the result's tokens into the plan, and have its models present the base's rows."""
    if plan.settings.tokenizer is None and plan.targets.on_shape_mismatch == "keep-base":
        return
    models = {source: model for source, model in plan.models.items() if source != "state"}
    slots, choice = architecture.embeddings(plan.pretrained.slots), plan.settings.tokenizer or "union"
    joined = join_vocabularies(models, slots, choice, plan.small_files)
    plan.vocabulary, plan.small_files = joined, joined.files or plan.small_files
    plan.settings = dataclasses.replace(plan.settings, tokenizer=plan.settings.tokenizer and joined.tokenizer)
    yield from joined.warnings


def _check(plan: Plan, architecture: Architecture) -> Iterator[str]:
    """Refuse what does not fit, and yield warnings about what is doubtful, as do all checks below."""
    plan.base.check_floats(key for layer in plan.layers for key in layer.keys)
    yield from _join_vocabularies(plan, architecture)
    if plan.settings.dtype == "fp8":
        check_fp8(plan.base)
    if plan.merged is not None:
        yield from _check_merged(plan, plan.merged)
    if plan.coverage.warning:
        yield plan.coverage.warning
    if warning := plan.method.warning([layer.view.shape for layer in plan.layers]):
        yield warning
    folders = [task.checkpoint.folder.resolve() for task in plan.tasks]
    if twice := [task.checkpoint.name for i, task in enumerate(plan.tasks) if folders[i] in folders[:i]]:
        yield f"{some(twice)} comes more than once in the stream"
    for task in plan.tasks:
        yield from _check_task(plan, task, architecture)
    if plan.settings.strict:
        refuse_losses(plan, ())
    yield from _check_state(plan)
    yield from check_relation(plan)
    bound = plan.settings.max_memory
    needed = process_memory(plan.settings.workers) + max(layer_memory(plan, layer) for layer in plan.layers)
    if bound is not None and needed > bound:
        needs = f"{needed / 1e9:.2f} GB that the largest layer needs by itself"
        raise ValueError(f"max_memory of {bound / 1e9:.2f} GB is below the {needs}")
    if (taken := Path(STATE_FILE).parts[0]) in plan.small_files and plan.keeps_state:
        raise ValueError(f"the base '{plan.base.name}' has a file '{taken}', where the state is to be kept: rename it")
    yield from verify_merged(plan)


def _check_merged(plan: Plan, merged: FullModel) -> Iterator[str]:
    """Check that a merged model has the base's keys and shapes, and was made with the same settings."""
    name, base = merged.checkpoint.name, plan.pretrained
    if plan.settings.step is None and "step" not in plan.before:
        advice = "say with --step which number the new one has"
        raise ValueError(f"'{name}' has no {MANIFEST} that tells how many tasks it holds: {advice}")
    for slot, shape in base.slots.items():
        if (other := merged.slots.get(slot)) != shape:
            but = f"'{slot}' is {other} there and {shape} in the base"
            raise ValueError(f"the merged model '{name}' was not made from the base '{plan.base.name}': {but}")
    floats = (slot for slot, key in base.keys.items() if plan.base.tensors[key].dtype in FLOATS)
    merged.checkpoint.check_floats(merged.keys[slot] for slot in floats)
    now, before = json.loads(json.dumps(plan.options())), plan.before.get("settings", {})
    lasting = ("method", *with_scope((type(plan.method.options), TargetConfig, Settings), "stream"))
    differing = [key for key in lasting if key in now and key in before and before[key] != now[key]]
    if changed := [f"{key} was {before[key]!r}, is {now[key]!r}" for key in differing]:
        yield f"settings differ from those that '{name}' was made with: {'; '.join(changed)}"


def verify_merged(plan: Plan) -> Iterator[str]:
    """Refuse a merged model on this disk if a file that is read is not what was saved."""
    if plan.merged is None or plan.merged.checkpoint.remote or not plan.settings.verify:
        return
    merged, state = plan.merged.checkpoint, Path(STATE_FILE).parent
    if plan.before and "files" not in plan.before:
        yield f"'{merged.name}' is of an earlier version, whose {MANIFEST} does not tell whether it was changed"
    names = [*merged.opened, *(f"{state}/{name}" for name in (plan.state.checkpoint.opened if plan.state else ()))]
    verify_files(merged.folder, plan.before, _CHANGED, names)


def _check_task(plan: Plan, task: FullModel, architecture: Architecture) -> Iterator[str]:
    """Check that a task comes from the base, has its layers and is not quantised."""
    name, base, chosen = task.checkpoint.name, plan.pretrained.slots, {layer.slot for layer in plan.layers}
    yield from _check_shapes(plan, task, architecture, chosen)
    lost = [slot for slot in base if slot in chosen and slot not in task.slots]
    if not isinstance(task, LoraAdapter) and lost:
        first, hint = lost[0], leave_out(next(layer.name for layer in plan.layers if layer.slot == lost[0]))
        raise ValueError(f"model '{name}' lacks layer '{first}' {base[first]} of the base, one of {len(lost)}{hint}")
    if len(lost) == len(chosen):
        raise ValueError(f"adapter '{name}' changes none of the {len(lost)} layers to merge, only {some(task.slots)}")
    changed = chosen | plan.averaged
    task.checkpoint.check_floats(key for slot, key in task.keys.items() if slot in changed)
    if extra := [slot for slot in task.slots if slot not in base]:
        yield f"'{name}' has {len(extra)} tensors that the base lacks, ignored: {some(extra)}"
    if absent := sorted(slot for slot in plan.averaged if not task.has(slot)):
        yield f"'{name}' is left out of the mean of {some(absent)}"
    outside = [slot for slot in task.pairs if slot not in chosen]
    if dora := [slot for slot in outside if slot in task.magnitudes and plan.targets.other_params != "pretrained"]:
        remedy = "name them in target_modules, or merge it into its base with peft, and give that folder"
        raise ValueError(f"adapter '{name}' changes {some(dora)} by DoRA outside the merged layers: {remedy}")
    if outside and plan.targets.other_params == "pretrained":
        yield f"adapter '{name}' also changes {some(outside)}: ignored"


def _check_shapes(plan: Plan, task: FullModel, architecture: Architecture, chosen: set[str]) -> Iterator[str]:
    """Check that a task's tensors have the base's shapes; have it ignore others if ``on_shape_mismatch`` allows it."""
    name = task.checkpoint.name
    for slot, shape in list(task.slots.items()):
        parts = architecture.parts(slot)  # of a tensor that was not split, since it has another shape
        expected = architecture.shape(slot) if parts else plan.pretrained.slots.get(slot)
        if expected is None:
            if slot in task.pairs:
                raise ValueError(f"adapter '{name}' is for another base: '{plan.base.name}' has no '{slot}'")
        elif shape != expected:
            outside = chosen.isdisjoint([slot, *parts])
            if not outside or plan.targets.on_shape_mismatch == "error":
                differs = f"shape {shape} differs from {expected} of the base '{plan.base.name}'"
                why = "it comes from another base, its vocabulary was changed, or it is a head that --heads can name"
                hint = "; --on-shape-mismatch keep-base leaves it as it is in the base" if outside else ""
                raise ValueError(f"model '{name}', tensor '{slot}': {differs}: {why}{hint}")
            task.ignore(slot)
    if task.ignored:
        yield f"'{name}': kept from the base because of their shape: {some(task.ignored)}"


def _check_state(plan: Plan) -> Iterator[str]:
    """Check that the method can go on from the state beside the merged model."""
    if plan.merged is None:
        return
    name, method, there = plan.merged.checkpoint.name, plan.method, plan.state.keys if plan.state else {}
    before, missing, known = plan.before.get("settings", {}), [], set()
    if plan.state is None and not before.get("state", True) and not method.state_is_weight:
        remedy = "merge its tasks again without --no-state, or merge them all at once with the new ones"
        raise ValueError(f"'{name}' was merged with --no-state, so that {method.label} can't go on from it: {remedy}")
    for layer in plan.layers:
        for key, slot, like in state_tensors(plan, layer).values():
            known.add(slot)
            if plan.state is None or slot not in there:
                missing.append(key)
                continue
            found, shape = plan.state.checkpoint.tensors[there[slot]], tuple(like.shape)
            dtypes = {describe(like).dtype, *(["F32"] if like.dtype == torch.float16 else [])}  # as it was kept before
            if found.dtype not in dtypes or found.shape != shape:
                but = f"{found.dtype} {found.shape} is not {str(like.dtype).removeprefix('torch.')} {shape}"
                advice = "as the base's layer would be; remove that folder if the weights beside it are right"
                raise ValueError(f"'{plan.state.checkpoint.name}', tensor '{slot}': {but}, {advice}")
    others = sorted(there.keys() - known)
    if method.state_is_weight:
        if before.get("accumulate") == "float32" and plan.settings.accumulate == "stored":
            yield f"'{name}' has the merged layers in float32; --accumulate float32 goes on from there"
        elif plan.keeps_state and missing and plan.before:
            yield f"'{name}' does not have all merged layers in float32: going on from the rounded ones"
    elif missing or others or plan.before.get("method", method.label) != method.label:  # a variant has its label
        what = f"no '{missing[0]}'" if missing else f"'{others[0]}'" if others else "that of another method"
        own = f"{method.label} goes on from its own merges of the same layers only"
        raise ValueError(f"the merged model '{name}' has {what} in {STATE_FILE}: {own}")


def check_relation(plan: Plan) -> Iterator[str]:
    """Warn if samples of the weights suggest another base, and refuse a layer that was drawn at random."""
    base, step = plan.base, max(1, len(plan.layers) // _SAMPLED_LAYERS)
    outside = [layer for layer in plan.layers if block_of(layer.name) is None]  # such as a pooler or a head
    sampled = list(dict.fromkeys([*plan.layers[::step][:_SAMPLED_LAYERS], *outside[:_SAMPLED_LAYERS]]))
    for model in plan.models.values():
        if type(model) is not FullModel or model is plan.pretrained or model.checkpoint.remote or base.remote:
            continue
        products, apart = [(0.0, 0.0, 0.0, 0.0)], []
        for layer in filter(lambda layer: model.has(layer.slot), sampled):
            info = base.tensors[layer.keys[0]]
            count = min(math.prod(info.shape), _SAMPLED_ELEMENTS)
            x = base.elements(layer.keys[0], 0, count).double()
            y = model.elements(layer.slot, 0, count, x).double()
            products.append((float(x @ x), float(y @ y), float(x @ y), float((y - x) @ (y - x))))
            if unrelated(*products[-1][:3]):
                apart.append(layer.name)
        xx, yy, xy, dd = map(sum, zip(*products, strict=True))
        if not xx * yy > 0:
            continue
        cosine, change, name = xy / (xx * yy) ** 0.5, (dd / xx) ** 0.5, model.checkpoint.name
        if 0 < len(apart) <= len(products) // 2:
            raise ValueError(f"model '{name}', layer '{apart[0]}' {UNRELATED}{leave_out(apart[0])}")
        if cosine < _LEAST_COSINE or change > _MOST_CHANGE:
            evidence = f"their weights have cosine {cosine:.3f}, ||tau|| / ||theta_0|| is {change:.2f}"
            other = f"'{name}' looks as if it was made from another base than '{base.name}'"
            yield f"{other}: over {len(sampled)} layers {evidence}"
        elif not dd:
            yield f"'{name}' does not differ from the base in the {len(sampled)} layers looked at"
