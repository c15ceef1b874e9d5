"""Whether a model fits the base with which it is merged: names, shapes, floats and emptiness."""

import logging
from collections.abc import Collection, Sequence, Set
from itertools import chain
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

_NOT_TOGETHER = "weights and config do not belong together"


def check_base(selection: Selection) -> None:
    """Refuse a base whose layers are not those that its config.json promises."""
    architecture = selection.architecture
    base = selection.base
    stored = selection.pretrained.entries
    names_by_key: dict[str, str] = {}  # of the parameters that hold layers, by their keys
    for layer in selection.layers:
        name = architecture.param(layer.view.key)
        if name == layer.param:
            names_by_key |= dict.fromkeys(layer.keys, name)
        elif name in stored:  # of a shape in which it holds no parts
            names_by_key[stored[name].key] = name
    # Before shapes are compared, since the placeholders of ZeRO-3 have a remedy of their own.
    base.check_not_empty(names_by_key)
    base.check_floats([*names_by_key, *chain(*(layer.keys for layer in selection.layers))])
    for key, name in names_by_key.items():
        shape = base.tensors[key].shape
        promised = architecture.shape(name)
        if shape != promised:
            raise ValueError(
                f"model '{base.name}', tensor '{key}': shape {shape} differs from {promised}, "
                f"which its config.json promises: {_NOT_TOGETHER}"
            )
    lost = sorted(layer.name for layer in selection.layers if not layer.keys)
    if lost:
        # A wrapper's prefix hides every layer, and excluding them one by one is no remedy.
        base.check_unwrapped(param for param in stored if not architecture.has(param))
        names_there = [layer.name for layer in selection.layers if layer.keys]
        raise ValueError(
            f"model '{base.name}' lacks the weight of {len(lost)} layers that its config.json "
            f"promises, '{lost[0]}' first: {_NOT_TOGETHER}{exclude_hint(lost, names_there)}"
        )
    unused = architecture.unused_keys(base)
    if unused:
        raise ValueError(
            f"model '{base.name}' stores {len(unused)} tensors of layers that its config.json does "
            f"not have, '{unused[0]}' first: {_NOT_TOGETHER}"
        )


def check_fit(
    selection: Selection,
    model: ModelWeights,
    required: Collection[str],
    changed: Set[str],
    reason: str = "",
    *,
    can_exclude: bool = True,
) -> None:
    """Refuse a model that lacks what it must have, updates what the base lacks, has tensors in
    other shapes than the base's, or none but placeholders, or quantised ones.

    Args:
        selection: what is merged of the base.
        model: a task, or the model merged so far.
        required: the params of the tensors that it must have.
        changed: those with which the merge computes, which must be floating point where the base's
            are.
        reason: why a tensor is lacking, or of another shape, by default what its name tells.
        can_exclude: whether the user has options that leave tensors out.
    """
    architecture = selection.architecture
    base = selection.pretrained
    model.source.check_unwrapped(param for param in model.entries if param not in base.entries)
    selection.base.check_unwrapped(param for param in base.entries if param not in model.entries)
    shapes = {}  # that are expected
    keys_with_elements = []
    for param, entry in model.entries.items():
        expected = base.entries[param].shape if param in base.entries else None
        is_divided = bool(architecture.packed_params(param))
        # The parts of a tensor that was not split, since it has another shape.
        if is_divided:
            expected = architecture.shape(param)
        shapes[param] = expected
        # An empty tensor is a lost one, unless the base's is empty, too.
        if entry.is_stored and expected is not None and 0 not in expected:
            keys_with_elements.append(entry.key)
    model.source.check_not_empty(keys_with_elements)
    for param, expected in shapes.items():
        entry = model.entries[param]
        if expected is None:
            if not entry.is_stored:  # an update, of which the base must have the rest
                why = _why_base_lacks(param, model, selection)
                _refuse(model, base, param, None, why)
        elif entry.shape != expected:
            why = _why_of_other_shape(entry.shape, expected, can_exclude=can_exclude)
            _refuse(model, base, param, expected, reason or why)
    lost = [param for param in required if param not in model.entries]
    if lost:
        why = reason or _why_layers_are_lost(lost, selection, model, can_exclude=can_exclude)
        _refuse(model, base, lost[0], base.entries[lost[0]].shape, why)
    keys = []
    for param, entry in model.entries.items():
        if param in changed and entry.is_stored and base.entries[param].dtype is not None:
            keys.append(entry.key)
    model.source.check_floats(keys)


def _refuse(
    model: ModelWeights,
    base: ModelWeights,
    param: str,
    expected: tuple[int, ...] | None,
    reason: str,
) -> NoReturn:
    """Refuse a model for a tensor that is in it or in the base alone, or in another shape."""
    shape = model.shapes.get(param)
    stored = base.info(param)
    if stored is not None:
        expected = stored.shape  # without the rows of new tokens
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
    if not base.entries.keys().isdisjoint(task.changed_params):
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
    lost: Sequence[str], selection: Selection, task: ModelWeights, *, can_exclude: bool
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
    renamed = with_same_ending(lost[0], task.entries.keys() - selection.pretrained.entries)
    if renamed:
        return (
            f"it has '{renamed[0]}', which the base lacks: its tensors are named otherwise, rename "
            "them as the base's are"
        )
    reason = f"layers that it lacks: {len(lost)}"
    if can_exclude:
        names_lost = [layer.name for layer in selection.layers if layer.param not in task.entries]
        names = [layer.name for layer in selection.layers if layer.param in task.entries]
        reason += exclude_hint(names_lost, names)
    return reason


def check_task(
    selection: Selection, task: ModelWeights, averaged: set[str], *, can_exclude: bool = True
) -> list[str]:
    """Refuse a task that does not fit the base, or changes no layer, and return warnings.

    ``averaged`` has the other tensors that the task is to change; ``can_exclude`` is that of
    :func:`check_fit`.
    """
    # In their order, and found at once: a mixture of experts has thousands.
    layers = dict.fromkeys(layer.param for layer in selection.layers)
    check_fit(selection, task, layers, layers.keys() | averaged, can_exclude=can_exclude)
    changed_params = task.changed_params
    if layers and layers.keys().isdisjoint(changed_params):
        raise ValueError(
            f"adapter '{task.source.name}' changes none of the {len(layers)} layers to merge: it "
            f"is of {format_names(changed_params)}"
        )
    architecture = selection.architecture
    name = task.source.name
    pretrained = selection.pretrained
    warnings = []
    # A folder in it may be the state or the heads of a result, or the weights in another form.
    unread = [file for file in task.source.unread_weights if "/" not in file]
    if unread:
        warnings.append(f"'{name}' has {format_names(unread)} beside its weights: not read")
    extra = []
    for param in task.entries:
        # Buffers such as inv_freq are in some files and not in others; a model computes them.
        if param not in pretrained.entries and not architecture.is_computed(param):
            extra.append(param)
    if extra:
        warnings.append(
            f"'{name}' has {len(extra)} tensors that the base lacks, ignored: {format_names(extra)}"
        )
    absent = sorted(param for param in averaged if param not in task.entries)
    if absent:
        warnings.append(f"'{name}' is left out of the mean of {format_names(absent)}")
    rule = selection.targets.other_params
    warnings += task.check_uses(pretrained, layers, rule, architecture)
    return warnings


def check_merged(
    selection: Selection, merged: ModelWeights, optional: Collection[str] = ()
) -> None:
    """Refuse a model merged so far that has not the base's tensors; ``optional`` has those that it
    may lack.
    """
    required = [param for param in selection.pretrained.entries if param not in optional]
    check_fit(selection, merged, required, set(required), "it was not made from this base")


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
