"""What a merge refuses before anything large is read, and what it warns of."""

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from fusion_bench_nufilt.models import TargetConfig
from fusion_bench_nufilt.models.adapter_config import COPY_HEAD
from fusion_bench_nufilt.models.architecture import Architecture, Layer
from fusion_bench_nufilt.models.coverage import coverage
from fusion_bench_nufilt.models.model import ModelWeights
from fusion_bench_nufilt.models.module import module_source
from fusion_bench_nufilt.models.source import format_names
from fusion_bench_nufilt.models.ties import differing
from fusion_bench_nufilt.models.vocabulary import new_rows_key
from fusion_bench_nufilt.utils.differences import differences, in_one_line, without_times
from fusion_bench_nufilt.utils.files import CARD, MANIFEST
from fusion_bench_nufilt.utils.manifest import STATE_FILE, verify_files
from fusion_bench_nufilt.utils.options import with_scope
from fusion_bench_nufilt.utils.schemas import Input
from fusion_bench_nufilt.utils.tensors import FLOATS, describe

from .beside import mean_key, means_to_keep, state_tensors
from .layout import is_rounded
from .plan import Plan, Selection
from .settings import Settings

log = logging.getLogger(__name__)

CHANGED = "merge or fetch it again; --no-verify goes on from it all the same"


def check_merged(plan: Plan, merged: ModelWeights) -> Iterator[str]:
    """Check that a merged model has the base's keys and shapes, and was made from this base with
    the same settings.
    """
    name = merged.source.name
    if plan.settings.step is None and "step" not in plan.before:
        advice = "say with --step which number the new one has"
        raise ValueError(f"'{name}' has no {MANIFEST} that tells how many tasks it holds: {advice}")
    check_made_from(plan.pretrained, merged, plan.computed)
    inputs = plan.before.get("inputs", {})
    if "base" in inputs:
        yield from check_inputs(plan, {"base": inputs["base"]}, f"'{name}'")
    now = plan.options()
    before = plan.before.get("settings", {})
    kinds = (type(plan.method.options), TargetConfig, Settings)
    lasting = [key for key in ("method", *with_scope(kinds, "stream")) if key in before]
    differing = differences(
        {key: before[key] for key in lasting if key in now},
        json.loads(json.dumps({key: now[key] for key in lasting if key in now})),
    )
    if differing:
        changed = "; ".join(map(str, differing))
        yield f"settings differ from those that '{name}' was made with: {changed}"


def check_inputs(plan: Plan, inputs: Mapping[str, Input], of: str) -> Iterator[str]:
    """Refuse a model that is not the one that a manifest names for its role in the merge, and warn
    where the manifest can't tell.

    ``of`` says whose manifest it is.
    """
    for role, saved in inputs.items():
        if role not in plan.models or not plan.settings.verify:
            continue
        now = plan.models[role].checkpoint.identity()
        name = f"'{plan.models[role].source.name}'"
        known_by = [key for key in ("revision", "files") if key in saved]
        differing = differences(
            {key: saved[key] for key in known_by},
            {key: now.get(key) for key in known_by},
        )
        if not differing:
            continue
        line = in_one_line(differing)
        if not without_times(differing):
            yield f"{name} may have changed since it was the {role} of {of}: {line}"
        elif known_by[0] not in now:
            yield f"{name} may not be the {role} of {of}, which is known by its {known_by[0]}"
        else:
            raise ValueError(
                f"{name} is not the {role} of {of}: {line}; name that one, or add --no-verify"
            )


def check_module(
    pretrained: nn.Module,
    model: nn.Module,
    name: str,
    drawn: Collection[str] = (),
    layers: Collection[str] | None = None,
) -> None:
    """Refuse a model in memory that was not fine-tuned from the pretrained one.

    ``drawn`` names weights that its checkpoint lacks, and ``layers`` the weights that it must have,
    by default those of all layers. Tensors that the pretrained model lacks do not matter.

    Raises:
        ValueError: a layer is missing, or a tensor has another shape, is not floating point or not
            finite; the message names the model, the tensor and the shapes.
    """
    architecture = Architecture(pretrained)
    base = ModelWeights(module_source("_pretrained_", pretrained), architecture)
    found = [
        Layer(view.name, param, (base.keys[param],), view)
        for param, view in architecture.views.items()
        if layers is None or view.key in layers
    ]
    others = architecture.others(base.source, found)
    computed = set(filter(architecture.is_computed, others))
    targets = TargetConfig(other_params="mean")
    selection = Selection(
        base,
        targets,
        found,
        others,
        set(),
        computed,
        coverage(pretrained, {}, targets),
        architecture.origin,
    )
    task = ModelWeights(module_source(name, model, drawn), architecture)
    if names := differing(architecture, task):
        raise ValueError(
            f"model '{name}' has "
            f"{format_names(names)} as weights of their own, which are one in its base: "
            f"{COPY_HEAD}, and name that folder"
        )
    for each in (base, task):
        each.tie(architecture)
    for warning in check_task(selection, task, architecture, selection.averaged_at(1)):
        log.info("%s", warning)


def check_made_from(base: ModelWeights, merged: ModelWeights, computed: Collection[str]) -> None:
    """Refuse a merged model that has not the base's tensors, in the base's shapes.

    It may lack those that are ``computed`` when a model is built.
    """
    expected = {
        param: shape
        for param, shape in base.params.items()
        if param in merged.params or param not in computed
    }
    for param, shape in expected.items():
        other = merged.params.get(param)
        if other != shape:
            but = f"'{param}' is {other} there and {shape} in the base"
            what = (
                f"the merged model '{merged.source.name}' was not made from the base "
                f"'{base.source.name}'"
            )
            raise ValueError(f"{what}: {but}")
    floats = [param for param in expected if base.source.tensors[base.keys[param]].dtype in FLOATS]
    merged.source.check_floats(merged.keys[param] for param in floats)


def verify_merged(plan: Plan) -> Iterator[str]:
    """Refuse a merged model on this disk if a file of it is not what was saved; with ``verify``
    off, warn where that file is not read.
    """
    if plan.merged is None or plan.merged.source.remote:
        return
    merged = plan.merged.checkpoint
    small = [
        name
        for name in plan.before.get("files", {})
        if name != CARD and not name.endswith(".safetensors")
    ]
    if plan.settings.verify:
        state = plan.state.source.opened if plan.state else ()
        of_state = [f"{Path(STATE_FILE).parent}/{name}" for name in state]
        verify_files(merged.folder, plan.before, CHANGED, [*merged.opened, *of_state, *small])
        return
    for name in small:
        try:
            verify_files(
                merged.folder, plan.before, "configurations in the result are the base's", [name]
            )
        except ValueError as error:
            yield str(error)


def kept_from_base(plan: Plan) -> list[str]:
    """Return the tensors outside the merged layers that some tasks have and that do not change."""
    kept: dict[str, None] = {}
    for task in plan.tasks:
        averaged = plan.averaged_of(task)
        for param in task.keys:
            if param in plan.others and param not in averaged and param not in plan.computed:
                kept[param] = None
    return list(kept)


def check_task(
    selection: Selection, task: ModelWeights, architecture: Architecture, averaged: set[str]
) -> Iterator[str]:
    """Refuse a task that has not the base's layers in the base's shapes, and yield warnings.

    ``averaged`` has the other tensors that the task is to change.
    """
    name = task.source.name
    base = selection.pretrained.params
    chosen = {layer.param for layer in selection.layers}
    yield from _check_shapes(selection, task, architecture, chosen)
    yield from task.check_base(selection.base)
    task.check_layers(selection.layers, selection.pretrained)
    changed = chosen | averaged
    task.source.check_floats(key for param, key in task.keys.items() if param in changed)
    extra = [param for param in task.params if param not in base]
    extra = [param for param in extra if not architecture.is_computed(param)]
    if extra:
        yield (
            f"'{name}' has {len(extra)} tensors that the base lacks, ignored: {format_names(extra)}"
        )
    if absent := sorted(param for param in averaged if not task.has(param)):
        yield f"'{name}' is left out of the mean of {format_names(absent)}"
    rule = selection.targets.other_params
    yield from task.check_outside(chosen, selection.pretrained, rule, architecture)


def check_modules(plan: Plan, task: ModelWeights) -> Iterator[str]:
    """Warn of the modules that sentence-transformers puts behind a task's model and the base has
    otherwise: they are not merged.
    """
    base = plan.pretrained.checkpoint.module_files()
    files = task.module_files()
    other = [name for name, content in files.items() if not _same_content(base.get(name), content)]
    if other:
        yield (
            f"'{task.source.name}' has other modules than the base, whose are kept: "
            f"{format_names(other)}"
        )


def _same_content(one: bytes | None, other: bytes) -> bool:
    """Compare two files; of weights, their tensors alone."""
    if one is None or one == other:
        return one == other
    try:
        tensors = load(one)
        others = load(other)
    except SafetensorError:
        return False
    return tensors.keys() == others.keys() and all(
        torch.equal(value, others[name]) for name, value in tensors.items()
    )


def _check_shapes(
    selection: Selection, task: ModelWeights, architecture: Architecture, chosen: set[str]
) -> Iterator[str]:
    """Check that a task's tensors have the base's shapes; have it ignore others if
    ``on_shape_mismatch`` allows it.
    """
    name, base = task.source.name, selection.base.name
    task.source.check_unwrapped(set(task.params) - set(selection.pretrained.params))
    selection.base.check_unwrapped(set(selection.pretrained.params) - set(task.params))
    full = {param: shape for param, shape in selection.pretrained.params.items() if 0 not in shape}
    task.source.check_not_empty(
        key for param, key in task.keys.items() if param in full or architecture.parts(param)
    )
    for param, shape in list(task.params.items()):
        parts = architecture.parts(
            param
        )  # of a tensor that was not split, since it has another shape
        expected = architecture.shape(param) if parts else selection.pretrained.params.get(param)
        if expected is None:
            task.check_base_has(param, selection.pretrained, architecture)
        elif shape != expected:
            outside = chosen.isdisjoint([param, *parts])
            if not outside or selection.targets.on_shape_mismatch == "error":
                differs = f"shape {shape} differs from {expected} of the base '{base}'"
                why = (
                    "it comes from another base, its vocabulary was changed, or it is a head that "
                    "--heads can name"
                )
                if len(shape) == 3 and shape == (expected[0], *expected[:0:-1]):
                    why = (
                        "transformers 5 saves these experts transposed: load the other model with "
                        "it and save it again"
                    )
                hint = (
                    "; on_shape_mismatch=keep-base leaves it as it is in the base"
                    if outside
                    else ""
                )
                raise ValueError(f"model '{name}', tensor '{param}': {differs}: {why}{hint}")
            task.ignore(param)
    if task.ignored:
        yield f"'{name}': kept from the base because of their shape: {format_names(task.ignored)}"


def check_state(plan: Plan, name: str) -> Iterator[str]:
    """Check that the method can go on from the state beside the merged model of this name."""
    method = plan.method
    before = plan.before.get("settings", {})
    made_by = plan.before.get("method", method.label)  # a variant has its method's label
    if made_by != method.label and not method.state_is_weight:
        raise ValueError(
            f"'{name}' was merged by {made_by}, which keeps no sums that {method.label} goes on "
            f"from: merge all of its tasks again with {method.name}, or go on with its own method"
        )
    stored = plan.state.keys if plan.state else {}
    if plan.state is None and before.get("state") is False and not method.state_is_weight:
        remedy = "merge its tasks again without --no-state, or all at once with the new ones"
        raise ValueError(
            f"'{name}' was merged with --no-state, so that {method.label} can't go on from it: "
            f"{remedy}"
        )
    missing = []
    known = {mean_key(param) for param in plan.others}
    known |= {new_rows_key(param) for param in plan.pretrained.params}
    for layer in plan.layers:
        for key, param, like in state_tensors(plan, layer).values():
            known.add(param)
            if param in stored:
                _check_stored(plan, param, like)
            elif not method.state_is_weight or _is_rounded(plan, param):
                missing.append(key)
    rounded_means = []
    for param, like in means_to_keep(plan).items():
        if mean_key(param) in stored:
            _check_stored(plan, mean_key(param), like)
        elif plan.models_in_mean(param) > 0 and _is_rounded(plan, param):
            rounded_means.append(param)
    others = sorted(stored.keys() - known)
    if method.state_is_weight:
        if plan.keeps_state and missing and plan.before:
            yield (
                f"'{name}' does not have all merged layers in float32: going on from the rounded "
                "ones"
            )
    elif missing or others:
        what = f"no '{missing[0]}'" if missing else f"'{others[0]}'"
        own = f"{method.label} goes on from its own merges of the same layers only"
        raise ValueError(f"the merged model '{name}' has {what} in {STATE_FILE}: {own}")
    if rounded_means:
        yield (
            f"'{name}' does not have the means of "
            f"{format_names(rounded_means)} in float32: going on from "
            "the rounded ones; all tasks at once, or --state from the first merge on, avoid that"
        )


def _check_stored(plan: Plan, param: str, like: Tensor) -> None:
    """Refuse a tensor of the state that has another shape or dtype than the plan needs."""
    assert plan.state is not None
    stored = plan.state.source.tensors[plan.state.keys[param]]
    shape = tuple(like.shape)
    # Earlier versions kept directions in float32.
    in_float32_before = like.dtype == torch.float16 and stored.dtype == "F32"
    same_dtype = in_float32_before or stored.dtype == describe(like).dtype
    if stored.shape != shape or not same_dtype:
        dtype = str(like.dtype).removeprefix("torch.")
        raise ValueError(
            f"'{plan.state.source.name}', tensor '{param}': {stored.dtype} {stored.shape} is not "
            f"{dtype} {shape}, as the base's layer would be; remove that folder if the weights "
            "beside it are right"
        )


def _is_rounded(plan: Plan, param: str) -> bool:
    """Tell whether the merged model has a tensor in fewer digits than float32."""
    if plan.merged is None:
        return plan.rounds(plan.pretrained.keys[param])
    return is_rounded(plan.merged.source.tensors[plan.merged.keys[param]])
