"""What happens to every parameter outside the merged layers."""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusion_bench_nufilt.core.dtypes import wide_dtype
from fusion_bench_nufilt.layers.targets import OtherParams
from fusion_bench_nufilt.layers.views import View


@torch.no_grad()
def merge_other_params(
    merged: nn.Module, task: nn.Module, layers: Mapping[str, View], other_params: OtherParams, step: int
) -> int:
    """Apply ``other_params`` to everything in the state dict of ``merged`` outside the merged layers, in place.

    Args:
        merged: the merged model so far; the pretrained one before step 1.
        task: the model of this step.
        layers: the merged layers by name.
        other_params: ``pretrained``, ``first`` or ``mean``.
        step: number of the task in the stream, from 1.

    Returns:
        How many entries were written. Entries that are not floating point, that ``task`` lacks or has in another
        shape, stay.
    """
    if other_params == "pretrained" or (other_params == "first" and step > 1):
        return 0
    ours, theirs = merged.state_dict(keep_vars=True), task.state_dict()
    in_layers: dict[int, list[View]] = defaultdict(list)
    for view in layers.values():
        in_layers[id(ours[view.key])].append(view)
    done: set[int] = set()
    written = 0
    for key, value in ours.items():
        if id(value) in done or key not in theirs or not value.is_floating_point():
            continue
        done.add(id(value))
        parts, new = in_layers[id(value)], theirs[key].to(value.device)
        if new.shape != value.shape or sum(view.shape[0] * view.shape[1] for view in parts) == value.numel():
            continue
        new = running_mean(value, new, step).to(value.dtype, copy=bool(parts))
        for view in parts:  # of a parameter that also holds what is not merged
            view.copy(value, new)
        value.copy_(new)
        written += 1
    return written


def running_mean(mean: Tensor, new: Tensor, step: int) -> Tensor:
    r"""Mean of ``step`` tensors from that of all but the last: :math:`m_t = m_{t-1} + (\theta_t - m_{t-1}) / t`.

    Exact at t = 1; in float32 at least, so that bf16 does not stall.
    """
    if step == 1:
        return new
    wide = wide_dtype(mean)
    return torch.lerp(mean.to(wide), new.to(wide), 1 / step)
