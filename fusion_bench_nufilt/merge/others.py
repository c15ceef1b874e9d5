"""The tensors outside the merged layers: copied or averaged, a bounded part at a time."""

import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_bench_nufilt.core.weights import is_finite, wide_dtype
from fusion_bench_nufilt.storage.tensors import CHUNK_BYTES, FLOATS, TensorInfo, raw

from .output import Output, Record
from .plan import Plan
from .sources.fp8 import Quantised
from .sources.models import FullModel
from .sources.mxfp4 import Packed

log = logging.getLogger(__name__)

#: The warning about such a tensor, which is copied.
NOT_FINITE = "tensor '%s' has NaN or infinite values in the base, and so in the result"


def write_other(plan: Plan, param: str, output: Output) -> None:
    """Write a tensor outside the merged layers, under every key that the result has for it."""
    read: defaultdict[str, Any] = defaultdict(hashlib.sha256)  # digests by model
    record: Record = {"param": param, "written": [], "read": {}, "reports": []}
    for key in plan.others[param]:
        finite = True
        place = plan.places[key]
        sha, offset = hashlib.sha256(), place.start
        for piece in _new_tensor(plan, param, key, read):
            data = raw(piece)
            output.write(place.file, data, offset)
            offset += len(data)
            sha.update(data)
            finite = finite and (
                place.dtype not in FLOATS or is_finite(piece.view(FLOATS[place.dtype]))
            )
        record["written"].append((place.file, place.start, place.stop, sha.hexdigest()))
        if not finite:
            record["not_finite"] = key
            log.warning(NOT_FINITE, key)
    record["read"] = {source: sha.hexdigest() for source, sha in read.items()}
    if param in plan.averaged:
        count, tasks = _in_mean(plan, param)
        record["mean_count"] = count + len(tasks)
    output.record(record)


def _in_mean(plan: Plan, param: str) -> tuple[int, dict[str, FullModel]]:
    """Return the number of models in the mean before this merge, without the base, and the tasks
    that join it.
    """
    tasks = (
        (number, task) for number, task in enumerate(plan.tasks) if param in plan.averaged_of(task)
    )
    having = {f"task {number}": task for number, task in tasks if task.has(param)}
    return plan.before.get("mean_counts", {}).get(param, plan.first_step - 1), having


def _new_tensor(plan: Plan, param: str, key: str, read: defaultdict[str, Any]) -> Iterable[Tensor]:
    """Return what the result holds for a tensor of the base, in pieces; update the digests of what
    is read.
    """

    def note(source: str, value: Tensor) -> None:
        read[source].update(raw(value))

    info, dtype = plan.base.tensors[key], plan.places[key].dtype
    grows = param in plan.vocabulary.params
    kept = info.dtype not in FLOATS or not (param in plan.averaged or plan.merged or grows)
    if kept and info.dtype == dtype and not isinstance(info, Quantised | Packed):
        return _copied(plan, info, read)
    values = _values(plan, param, key, note)
    if grows:
        values = plan.vocabulary.grown(param, values, plan.dtype(key), read)
    return _narrowed(values, key, FLOATS[dtype])


def _copied(plan: Plan, info: TensorInfo, read: defaultdict[str, Any]) -> Iterator[Tensor]:
    for piece in plan.base.opened[info.file].chunks(info):
        read["base"].update(raw(piece))
        yield piece


def _narrowed(values: Iterable[Tensor], key: str, dtype: torch.dtype) -> Iterator[Tensor]:
    for value in values:
        narrow = value.to(dtype)
        if not is_finite(narrow) and is_finite(value):
            raise ValueError(
                f"tensor '{key}' has values that {dtype} can't hold: choose another --dtype"
            )
        yield narrow


def average_others(plan: Plan, write: Callable[[str, Tensor], object]) -> dict[str, int]:
    """Average the tensors outside the merged layers in memory; return the number of models in the
    mean of each.

    ``write`` takes a key in the base and the new values; a tied tensor comes once.
    """
    counts = {}
    for param in plan.averaged:
        count, tasks = _in_mean(plan, param)
        counts[param] = count + len(tasks)
        key = plan.others[param][0]
        if tasks and (pieces := list(_values(plan, param, key, lambda source, value: None))):
            write(key, torch.cat(pieces).reshape(plan.base.tensors[key].shape))
    return counts


def _values(
    plan: Plan, param: str, key: str, note: Callable[[str, Tensor], object]
) -> Iterator[Tensor]:
    """Yield the new values, flattened, piece by piece; ``note`` takes every piece that is read, by
    its model.
    """
    base, merged, dtype = plan.base, plan.merged, plan.dtype(key)
    count, tasks = _in_mean(plan, param)
    averaged = param in plan.averaged
    models = list(tasks.values()) if averaged else []
    if merged is not None:
        models.append(merged)
    numel = math.prod(base.tensors[key].shape)
    length = _piece_length([base.tensors[key].unit, *(model.unit(param) for model in models)])
    for start in range(0, numel, length):
        between = start, min(start + length, numel)
        theta_0 = base.elements(key, *between)
        note("base", theta_0)
        value = theta_0 = theta_0.to(dtype)
        if merged is not None:
            so_far = merged.elements(param, *between, theta_0)
            note("merged", so_far)
            value = so_far.to(dtype)
        for number, (source, task) in enumerate(tasks.items() if averaged else (), count + 1):
            new = task.elements(param, *between, theta_0)
            note(source, new)
            if not is_finite(new):
                raise ValueError(
                    f"model '{task.source.name}', tensor '{param}' has NaN or infinite values"
                )
            value = running_mean(value, task.at_strength(new, theta_0), number)  # type: ignore[arg-type]
        value = value.to(dtype)  # once, since rounding after every task would add up
        if averaged and not is_finite(value):
            raise ValueError(f"tensor '{param}': the mean has values that {dtype} can't hold")
        yield value


def _piece_length(units: Sequence[int]) -> int:
    """Return the length of the pieces of a tensor, which cut no unit of the largest size, so that
    none is decoded twice.
    """
    most = CHUNK_BYTES // 8
    largest = max(units)
    return most - most % largest if largest <= most else largest


def running_mean(mean: Tensor, new: Tensor, count: int) -> Tensor:
    r"""Return the mean of ``count`` tensors, given that of all but the last: :math:`m + (\theta -
    m) / \text{count}`.

    It is exact for the first tensor, and computed in float32 at least, so that bfloat16 does not
    stall.
    """
    if count == 1:
        return new
    wide = wide_dtype(mean)
    return torch.lerp(mean.to(wide), new.to(wide), 1 / count)
