"""Whether a model fits the base with which it is merged: names, shapes, floats and emptiness."""

import logging
from collections.abc import Collection, Sequence
from typing import NoReturn

from torch import nn

from fusion_bench_nufilt.methods.options import TargetConfig

from .adapters import with_peft
from .architecture import Architecture
from .heads import Heads
from .layers import Layer, exclude_hint, with_same_ending
from .model import COPY_HEAD, ModelWeights, names_apart
from .selection import Selection
from .source import format_names, module_source

log = logging.getLogger(__name__)


def check_tensors(selection: Selection, task: ModelWeights, *, can_exclude: bool = True) -> None:
    """Refuse a task that lacks layers of the base, updates what the base lacks, or has tensors in
    other shapes than the base's.

    ``can_exclude`` tells whether the user has options that leave tensors out.
    """
    architecture = selection.architecture
    base = selection.pretrained
    shapes_of_base = base.shapes
    task.source.check_unwrapped(set(task.entries) - set(base.entries))
    selection.base.check_unwrapped(set(base.entries) - set(task.entries))
    # An empty tensor is a lost one, unless the base's is empty, too.
    with_elements = {param for param, shape in shapes_of_base.items() if 0 not in shape}
    keys_with_elements = []
    for param, entry in task.entries.items():
        if entry.key and (param in with_elements or architecture.packed_params(param)):
            keys_with_elements.append(entry.key)
    task.source.check_not_empty(keys_with_elements)
    for param, entry in task.entries.items():
        expected = shapes_of_base.get(param)
        # The parts of a tensor that was not split, since it has another shape.
        if architecture.packed_params(param):
            expected = architecture.shape(param)
        if expected is None:
            if not entry.key:  # an update, of which the base must have the rest
                reason = _why_base_lacks(param, task, selection)
                _refuse(task, base, param, None, reason)
        elif entry.shape != expected:
            reason = _why_of_other_shape(entry.shape, expected, can_exclude=can_exclude)
            _refuse(task, base, param, expected, reason)
    lost = [layer for layer in selection.layers if not task.has(layer.param)]
    if lost:
        reason = _why_layers_are_lost(lost, selection, task, can_exclude=can_exclude)
        _refuse(task, base, lost[0].param, shapes_of_base[lost[0].param], reason)
    if selection.layers and not any(layer.param in task.entries for layer in selection.layers):
        raise ValueError(
            f"adapter '{task.source.name}' changes none of the {len(selection.layers)} layers to "
            f"merge: it is of {format_names(task.entries)}"
        )


def _refuse(
    model: ModelWeights,
    base: ModelWeights,
    param: str,
    expected: tuple[int, ...] | None,
    reason: str,
) -> NoReturn:
    """Refuse a model for a tensor that is in it or in the base alone, or in another shape."""
    shape = model.shapes.get(param)
    label = f"{model.kind} '{model.source.name}'"
    of_base = f"the base '{base.source.name}'"
    problem = f"{label}, tensor '{param}': shape {shape} differs from {expected} of {of_base}"
    if shape is None:
        problem = f"{label} lacks '{param}' {expected} of {of_base}"
    if expected is None:
        problem = f"{label} changes '{param}', which {of_base} lacks"
    raise ValueError(f"{problem}: {reason}")


def _why_base_lacks(param: str, task: ModelWeights, selection: Selection) -> str:
    """Return why an adapter updates what the base lacks."""
    base = selection.pretrained
    renamed = with_same_ending(param, base.entries)
    if renamed:
        return (
            f"it was trained on another class of the model, where this is '{renamed[0]}'; with "
            f"that class, {with_peft(task.checkpoint, selection.architecture)}"
        )
    if not task.entries.keys().isdisjoint(base.entries):
        return "give as the base the model with that layer, on which the adapter was trained"
    return "it is for another base"


def _why_of_other_shape(
    shape: tuple[int, ...], expected: tuple[int, ...], *, can_exclude: bool
) -> str:
    if len(shape) == 3 and shape == (expected[0], *expected[:0:-1]):
        # The same sizes, with the last two exchanged.
        return (
            "transformers 5 saves these experts transposed: load the other model with it and save "
            "it again"
        )
    reason = "it comes from another base, its vocabulary was changed, or it is a head"
    if can_exclude:
        reason += " that --heads can name"
    return reason


def _why_layers_are_lost(
    lost: Sequence[Layer], selection: Selection, task: ModelWeights, *, can_exclude: bool
) -> str:
    naming = selection.architecture.naming
    for key in task.source.whole:
        if not naming.is_of_other_layout(key):
            continue
        # What transformers 5 loads is joined: the other one is to be saved so.
        divided = task.source.name
        if naming.is_of_loaded(key):
            divided = selection.base.name
        return (
            f"it has '{key}': one of the two stores experts one by one, and the other joined. Load "
            f"'{divided}' with transformers 5, and save it with "
            "save_pretrained(FOLDER, save_original_format=False)"
        )
    renamed = with_same_ending(lost[0].param, task.entries.keys() - selection.pretrained.entries)
    if renamed:
        return (
            f"it has '{renamed[0]}', which the base lacks: its tensors are named otherwise, rename "
            "them as the base's are"
        )
    reason = f"layers that it lacks: {len(lost)}"
    if can_exclude:
        names = [layer.name for layer in selection.layers if layer.param in task.entries]
        reason += exclude_hint([layer.name for layer in lost], names)
    return reason


def check_task(
    selection: Selection, task: ModelWeights, averaged: set[str], *, can_exclude: bool = True
) -> list[str]:
    """Refuse a task that is not of the base, or has no numbers in the layers, and return warnings.

    ``averaged`` has the other tensors that the task is to change; ``can_exclude`` is that of
    :func:`check_tensors`.
    """
    check_tensors(selection, task, can_exclude=can_exclude)
    architecture = selection.architecture
    name = task.source.name
    pretrained = selection.pretrained
    merged_params = {layer.param for layer in selection.layers}
    changed = merged_params | averaged
    warnings = []
    # A folder in it may be the state or the heads of a result, or the weights in another form.
    unread = [file for file in task.source.unread_weights if "/" not in file]
    if unread:
        warnings.append(f"'{name}' has {format_names(unread)} beside its weights: not read")
    entries = [entry for param, entry in task.entries.items() if param in changed]
    task.source.check_floats(entry.key for entry in entries if entry.key)
    extra = []
    for param in task.entries:
        # Buffers such as inv_freq are in some files and not in others; a model computes them.
        if param not in pretrained.entries and not architecture.is_computed(param):
            extra.append(param)
    if extra:
        warnings.append(
            f"'{name}' has {len(extra)} tensors that the base lacks, ignored: {format_names(extra)}"
        )
    absent = sorted(param for param in averaged if not task.has(param))
    if absent:
        warnings.append(f"'{name}' is left out of the mean of {format_names(absent)}")
    rule = selection.targets.other_params
    warnings += task.check_uses(pretrained, merged_params, rule, architecture)
    return warnings


def check_made_from(base: ModelWeights, merged: ModelWeights, optional: Collection[str]) -> None:
    """Refuse a merged model that has not the base's tensors, in the base's shapes; ``optional`` has
    those that it may lack.
    """
    float_keys = []
    shapes = merged.shapes
    for param, entry in base.entries.items():
        if param not in shapes and param in optional:
            continue
        if shapes.get(param) != entry.shape:
            _refuse(merged, base, param, entry.shape, "it was not made from this base")
        if entry.dtype is not None:
            float_keys.append(merged.entries[param].key)
    merged.source.check_floats(float_keys)


def check_module(
    pretrained: nn.Module,
    model: nn.Module,
    name: str,
    missing_keys: Collection[str] = (),
    layers: Collection[str] | None = None,
) -> None:
    """Refuse a model in memory that was not fine-tuned from the pretrained one.

    ``missing_keys`` are of weights that its checkpoint lacks, and ``layers`` are the weights that
    it must have, by default those of all layers. Tensors that the pretrained model lacks do not
    matter.

    Raises:
        ValueError: a layer is missing, or a tensor has another shape, is not floating point or not
            finite; the message names the model, the tensor and the shapes.
    """
    architecture = Architecture(pretrained)
    base = ModelWeights(module_source("_pretrained_", pretrained), architecture)
    required_layers = []
    for param, view in architecture.views.items():
        if layers is None or view.key in layers:
            required_layers.append(Layer(view.name, param, (base.entries[param].key,), view))
    # With a mean, tensors outside the layers are checked, too: any of them may be averaged.
    targets = TargetConfig(other_params="mean")
    no_heads = Heads("none", base.shapes, base.source.config)
    selection = Selection.of(architecture, base, targets, no_heads, required_layers)
    task = ModelWeights(module_source(name, model, missing_keys), architecture)
    untied = names_apart(architecture, task)
    if untied:
        raise ValueError(
            f"model '{name}' has {format_names(untied)} as weights of their own, which are one "
            f"in its base: {COPY_HEAD}, and name that folder"
        )
    base.tie(architecture)
    task.tie(architecture)
    for warning in check_task(selection, task, selection.averaged_at(1), can_exclude=False):
        log.info("%s", warning)
