"""What happens to every parameter outside the merged layers."""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusion_bench_nufilt.core.weights import wide_dtype
from fusion_bench_nufilt.layers.views import View


@torch.no_grad()
def merge_other_params(
    merged: nn.Module,
    task: nn.Module,
    layers: Mapping[str, View],
    counts: defaultdict[str, int],
) -> int:
    """Average everything in the state dict of ``merged`` that is outside the merged layers, in place.

    The mean of an entry is that of the models which have it in the shape of ``merged``. Until one of them has it, the
    entry stays the pretrained model's.

    Args:
        merged: the merged model so far; the pretrained model before the first task.
        task: the model that is merged now.
        layers: the merged layers by name.
        counts: for each entry the number of models in its mean so far; it is updated.

    Returns:
        The number of entries that were written. Entries that are not floating point, or that ``task`` does not have,
        stay.
    """
    ours, theirs = merged.state_dict(keep_vars=True), task.state_dict()
    in_layers: dict[int, list[View]] = defaultdict(list)
    for view in layers.values():
        in_layers[id(ours[view.key])].append(view)
    done: set[int] = set()
    written = 0
    for key, value in ours.items():
        parts = in_layers[id(value)]
        whole = sum(view.shape[0] * view.shape[1] for view in parts) == value.numel()
        if id(value) in done or whole or not value.is_floating_point():
            continue
        done.add(id(value))
        counts[key] += int(counted := key in theirs and theirs[key].shape == value.shape)
        if not counted:
            continue
        new = running_mean(value, theirs[key].to(value.device), counts[key]).to(value.dtype, copy=bool(parts))
        for view in parts:  # the parameter also holds merged layers, which stay
            view.copy(value, new)
        value.copy_(new)
        written += 1
    return written


def running_mean(mean: Tensor, new: Tensor, count: int) -> Tensor:
    r"""Return the mean of ``count`` tensors, given that of all but the last: :math:`m + (\theta - m) / \text{count}`.

    It is exact for the first tensor, and computed in float32 at least, so that bfloat16 does not stall.
    """
    if count == 1:
        return new
    wide = wide_dtype(mean)
    return torch.lerp(mean.to(wide), new.to(wide), 1 / count)
