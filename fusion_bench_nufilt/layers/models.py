"""Whole models: which are refused, and what happens to every parameter outside the merged layers."""

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from fusion_bench_nufilt.core.weights import is_finite, wide_dtype
from fusion_bench_nufilt.layers.targets import OnShapeMismatch, OtherParams
from fusion_bench_nufilt.layers.views import View

log = logging.getLogger(__name__)

#: A fine-tuned weight has a cosine of nearly 1 with its pretrained value; unrelated weights have one of about 0.
LEAST_COSINE = 0.1
UNRELATED = "has nothing to do with the pretrained model's: one of them was drawn at random"


def leave_out(layer: str) -> str:
    """Return the end of a message about a layer that only some of the models have."""
    return f"; exclude_modules=[{layer}] leaves it out"


def check_model(
    pretrained: nn.Module,
    model: nn.Module,
    merged: Collection[str] | None = None,
    *,
    name: str,
    other_params: OtherParams = "mean",
    on_shape_mismatch: OnShapeMismatch = "error",
    heads: Collection[str] = (),
) -> None:
    """Refuse a model that cannot be merged with the pretrained one.

    ``merged`` are the state-dict keys of the parameters that hold merged layers; None means all matrices. With
    ``other_params="pretrained"``, the values of other parameters do not matter, since they are not taken. With
    ``on_shape_mismatch="keep-base"``, they may differ in shape, which is logged as a warning. Parameters in ``heads``
    are not checked.

    Raises:
        ValueError: a parameter with merged layers is missing or not floating point, or any parameter has another shape
            or is not finite; the message names the model, the parameter and the shapes.
    """
    reference, state = pretrained.state_dict(), model.state_dict()
    keys = [key for key, value in pretrained.named_parameters() if value.ndim == 2] if merged is None else merged
    for key in keys:
        if key not in state:
            shape, hint = tuple(reference[key].shape), "" if merged is None else leave_out(key.rpartition(".")[0])
            raise ValueError(f"model '{name}' lacks layer '{key}' {shape} of the pretrained model{hint}")
    kept = []
    for key, value in state.items():
        if key not in reference or key in heads:
            continue
        expected, in_layer = tuple(reference[key].shape), key in keys
        what = f"model '{name}', {'layer' if in_layer else 'parameter'} '{key}'"
        if not value.is_floating_point():
            if in_layer:
                raise ValueError(f"{what}: expected floating-point values, got {value.dtype}")
        elif value.shape != expected:
            if in_layer or on_shape_mismatch == "error":
                hint = "" if in_layer else "; on_shape_mismatch=keep-base leaves it as it is there"
                shapes = f"shape {tuple(value.shape)} differs from the pretrained model's {expected}"
                raise ValueError(f"{what}: {shapes}{hint}")
            kept.append(key)
        elif (in_layer or other_params != "pretrained") and not is_finite(value):
            raise ValueError(f"{what} has NaN or infinite values")
    if kept:
        log.warning("model '%s': kept from the pretrained model because of their shape: %s", name, ", ".join(kept))


def check_related(pretrained: nn.Module, model: nn.Module, layers: Mapping[str, View], *, name: str) -> None:
    """Raise a ValueError for a layer that is unrelated to the pretrained model's; it names the layer and a remedy."""
    for layer, view in layers.items():
        x = view.read(pretrained).flatten().float()
        y = view.read(model).flatten().to(x)
        if unrelated(*torch.stack([x @ x, y @ y, x @ y]).tolist()):
            raise ValueError(f"model '{name}', layer '{layer}' {tuple(view.shape)} {UNRELATED}{leave_out(layer)}")


def unrelated(xx: float, yy: float, xy: float) -> bool:
    """Tell from their inner products whether two weights are unrelated; one that is zero counts as untrained."""
    return xx * yy > 0 and xy < LEAST_COSINE * math.sqrt(xx * yy)


@torch.no_grad()
def merge_other_params(
    merged: nn.Module,
    task: nn.Module,
    layers: Mapping[str, View],
    counts: defaultdict[str, int],
    heads: Collection[str] = (),
    drawn: Collection[str] = (),
) -> None:
    """Average everything in the state dict of ``merged`` that is outside the merged layers and ``heads``, in place.

    The mean is over the models that have an entry in the shape of ``merged``; ``counts`` holds their number and is
    updated. Entries in ``drawn``, which the task has drawn at random, do not count. An entry keeps the pretrained
    model's values until a model has it, and always if it is not floating point.
    """
    ours, theirs = merged.state_dict(keep_vars=True), task.state_dict()
    in_layers: dict[int, list[View]] = defaultdict(list)
    for view in layers.values():
        in_layers[id(ours[view.key])].append(view)
    done: set[int] = set()
    for key, value in ours.items():
        parts = in_layers[id(value)]
        whole = sum(math.prod(view.shape) for view in parts) == value.numel()
        if key in heads or id(value) in done or whole or not value.is_floating_point():
            continue
        done.add(id(value))
        fits = key in theirs and key not in drawn and theirs[key].shape == value.shape
        counts[key] += fits
        if not fits:
            continue
        new = running_mean(value, theirs[key].to(value.device), counts[key]).to(value.dtype, copy=bool(parts))
        for view in parts:  # the parameter also holds merged layers, which stay
            view.copy(value, new)
        value.copy_(new)


def running_mean(mean: Tensor, new: Tensor, count: int) -> Tensor:
    r"""Return the mean of ``count`` tensors, given that of all but the last: :math:`m + (\theta - m) / \text{count}`.

    It is exact for the first tensor, and computed in float32 at least, so that bfloat16 does not stall.
    """
    if count == 1:
        return new
    wide = wide_dtype(mean)
    return torch.lerp(mean.to(wide), new.to(wide), 1 / count)
