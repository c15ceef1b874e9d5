"""The tensors outside the merged layers: copied from the base or the merged model, or averaged over the tasks."""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fusion_bench_nufilt.core.weights import is_finite
from fusion_bench_nufilt.layers import running_mean
from fusion_bench_nufilt.storage.tensors import CHUNK_BYTES, FLOATS, raw

from .models import FullModel
from .output import Output, Record
from .plan import Plan

log = logging.getLogger(__name__)

_Digests = defaultdict[str, Any]  # of what was read, by model

#: What is said of a tensor outside the merged layers, which stays the base's.
NOT_FINITE = "tensor '%s' has NaN or infinite values in the base, and so in the result"


def write_other(plan: Plan, slot: str, output: Output) -> None:
    """Write a tensor outside the merged layers wherever the base has it, a bounded number of bytes at a time."""
    read = _Digests(hashlib.sha256)
    record: Record = {"slot": slot, "written": [], "reports": []}
    for key in plan.others[slot]:
        info, sha, finite = plan.base.tensors[key], hashlib.sha256(), True
        offset = info.start
        for piece in _pieces(plan, slot, key, read):
            data = raw(piece)
            output.write(info.file, data, offset)
            offset += len(data)
            sha.update(data)
            finite = finite and (info.dtype not in FLOATS or is_finite(piece.view(FLOATS[info.dtype])))
        if not finite:
            record["not_finite"] = key
            log.warning(NOT_FINITE, key)
        record["written"].append((info.file, info.start, info.stop, sha.hexdigest()))
    record["read"] = {source: sha.hexdigest() for source, sha in read.items()}
    if slot in plan.averaged:
        count, tasks = _in_mean(plan, slot)
        record["mean_count"] = count + len(tasks)
    output.record(record)


def _in_mean(plan: Plan, slot: str) -> tuple[int, dict[str, FullModel]]:
    """Return the number of models in the mean before this merge, without the base, and the tasks that come to it."""
    tasks = plan.tasks[:1] if plan.targets.other_params == "first" else plan.tasks
    having = {f"task {number}": task for number, task in enumerate(tasks) if task.has(slot)}
    return plan.before.get("mean_counts", {}).get(slot, plan.first_step - 1), having


def _pieces(plan: Plan, slot: str, key: str, read: _Digests) -> Iterator[Tensor]:
    """Yield the new tensor, flattened, piece by piece, and take the digests of what is read."""
    info, base, merged = plan.base.tensors[key], plan.base.file(key), plan.merged
    averaged = slot in plan.averaged
    if info.dtype not in FLOATS or not (averaged or merged):
        for piece in base.chunks(info):
            read["base"].update(raw(piece))
            yield piece
        return
    count = CHUNK_BYTES // 8
    for start in range(0, info.numel, count):
        stop = min(start + count, info.numel)
        value = theta_0 = base.elements(info, start, stop)
        read["base"].update(raw(theta_0))
        if merged is not None:
            so_far = merged.elements(slot, start, stop, theta_0)
            read["merged"].update(raw(so_far))
            value = so_far.to(theta_0.dtype)
        yield _mean(plan, slot, (start, stop), theta_0, value, read) if averaged else value


def _mean(plan: Plan, slot: str, between: tuple[int, int], theta_0: Tensor, so_far: Tensor, read: _Digests) -> Tensor:
    """Return the mean over the tasks of some elements, given the base's and the mean before them."""
    value, (count_before, tasks) = so_far, _in_mean(plan, slot)
    for count, (source, task) in enumerate(tasks.items(), count_before + 1):
        new = task.elements(slot, *between, theta_0)
        read[source].update(raw(new))
        if not is_finite(new):
            raise ValueError(f"model '{task.checkpoint.name}', tensor '{slot}' has NaN or infinite values")
        value = running_mean(value, new, count)
    value = value.to(theta_0.dtype)  # once: roundings after every task would add up
    if not is_finite(value):
        raise ValueError(f"tensor '{slot}': the mean has values that {theta_0.dtype} can't hold")
    return value
