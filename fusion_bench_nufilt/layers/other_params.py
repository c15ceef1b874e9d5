"""What happens to every parameter outside the merged layers."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fusion_bench_nufilt.layers.config import OtherParams


@torch.no_grad()
def merge_other_params(
    merged: nn.Module, task: nn.Module, keys: Iterable[str], other_params: OtherParams, step: int
) -> int:
    """Apply ``other_params`` to everything in the state dict of ``merged`` outside the merged layers, in place.

    Args:
        merged: the merged model so far; the pretrained one before step 1.
        task: the model of this step.
        keys: state-dict keys of the merged layers.
        other_params: ``pretrained``, ``first`` or ``mean``.
        step: number of the task in the stream, from 1.

    Returns:
        How many entries were written. Entries that are not floating point, or that ``task`` lacks, stay.
    """
    if other_params == "pretrained" or (other_params == "first" and step > 1):
        return 0
    ours, theirs = merged.state_dict(keep_vars=True), task.state_dict()
    done = {id(ours[key]) for key in keys}
    written = 0
    for key, value in ours.items():
        if id(value) in done or key not in theirs or not value.is_floating_point():
            continue
        done.add(id(value))
        written += 1
        new = theirs[key].to(value.device)
        value.copy_(running_mean(value, new, step))
    return written


def running_mean(mean: Tensor, new: Tensor, step: int) -> Tensor:
    r"""Mean of ``step`` tensors from that of all but the last: :math:`m_t = m_{t-1} + (\theta_t - m_{t-1}) / t`.

    Exact at t = 1; in float32 at least, so that bf16 does not stall.
    """
    if step == 1:
        return new
    wide = torch.promote_types(mean.dtype, torch.float32)
    return torch.lerp(mean.to(wide), new.to(wide), 1 / step)
