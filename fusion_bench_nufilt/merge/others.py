"""The tensors outside the merged layers: copied or averaged, a bounded part at a time."""

import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_bench_nufilt.models.encoded import Encoded
from fusion_bench_nufilt.models.vocabulary import new_rows_key
from fusion_bench_nufilt.utils.tensors import (
    CHUNK_BYTES,
    FLOATS,
    TensorInfo,
    is_finite,
    raw,
    wide_dtype,
)

from .beside import mean_key, means_to_keep
from .output import Output, Record
from .plan import Plan

log = logging.getLogger(__name__)

#: The warning about such a tensor, which is copied.
NOT_FINITE = "tensor '%s' has NaN or infinite values in the base, and so in the result"


def write_other(
    plan: Plan, param: str, state_places: Mapping[str, TensorInfo], output: Output
) -> None:
    """Write a tensor outside the merged layers, under every key that the result has for it.

    ``state_places`` has the places in the file of the state, by key.
    """
    read: defaultdict[str, Any] = defaultdict(hashlib.sha256)  # digests by model

    def note(source: str, value: Tensor) -> None:
        read[source].update(raw(value))

    record: Record = {"param": param, "written": [], "read": {}, "reports": []}
    mean_place = state_places.get(mean_key(param))
    for key in plan.others[param]:
        finite = True
        values = _values(plan, param, key, note)
        if mean_place is not None:
            values = _writing_mean(values, mean_place, record, output)
            mean_place = None  # one of the keys of a tied tensor is enough
        place = plan.places[key]
        writer = _Writer(output, place)
        for piece in _new_tensor(plan, param, key, values, read):
            writer.write(piece)
            finite = finite and (
                place.dtype not in FLOATS or is_finite(piece.view(FLOATS[place.dtype]))
            )
        record["written"].append(writer.entry())
        if not finite:
            record["not_finite"] = key
            log.warning(NOT_FINITE, key)
    rows_place = state_places.get(new_rows_key(param))
    if rows_place is not None:
        rows_writer = _Writer(output, rows_place)
        rows_writer.write(plan.vocabulary.new_rows(param))
        record["written"].append(rows_writer.entry())
    record["read"] = {source: sha.hexdigest() for source, sha in read.items()}
    if param in plan.averaged:
        record["mean_count"] = plan.models_in_mean(param) + len(plan.joining(param))
    output.record(record)


class _Writer:
    """Writes a tensor to its place in a file, piece by piece."""

    def __init__(self, output: Output, place: TensorInfo) -> None:
        self._output, self._place = output, place
        self._offset = place.start
        self._sha = hashlib.sha256()

    def write(self, piece: Tensor) -> None:
        data = raw(piece)
        self._output.write(self._place.file, data, self._offset)
        self._offset += len(data)
        self._sha.update(data)

    def entry(self) -> tuple[str, int, int, str]:
        """Return the range of bytes and its digest, as the journal lists them."""
        place = self._place
        return place.file, place.start, place.stop, self._sha.hexdigest()


def _writing_mean(
    values: Iterable[Tensor], place: TensorInfo, record: Record, output: Output
) -> Iterator[Tensor]:
    """Pass the pieces of a mean on, and write them to the state as they come."""
    writer = _Writer(output, place)
    for value in values:
        writer.write(value.to(FLOATS[place.dtype]))
        yield value
    record["written"].append(writer.entry())


def _new_tensor(
    plan: Plan, param: str, key: str, values: Iterable[Tensor], read: defaultdict[str, Any]
) -> Iterable[Tensor]:
    """Return what the result holds for a tensor of the base, in pieces, given its values; update
    the digests of what is read.
    """
    info, dtype = plan.base.tensors[key], plan.places[key].dtype
    grows = param in plan.vocabulary.params
    kept = info.dtype not in FLOATS or not (param in plan.averaged or plan.merged or grows)
    if kept and info.dtype == dtype and not isinstance(info, Encoded):
        return _copied(plan, info, read)
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


def average_others(
    plan: Plan, write: Callable[[str, Tensor], object]
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Average the tensors outside the merged layers in memory.

    ``write`` takes a key in the base and the new values; a tied tensor comes once. Return the
    number of models in the mean of each, by param, and the means that the model rounds, by their
    keys in the state.
    """
    counts = {}
    means = {}
    to_keep = means_to_keep(plan)
    for param in plan.averaged:
        tasks = plan.joining(param)
        counts[param] = plan.models_in_mean(param) + len(tasks)
        key = plan.others[param][0]
        pieces = list(_values(plan, param, key, lambda source, value: None))
        if not pieces:
            continue
        value = torch.cat(pieces).reshape(plan.base.tensors[key].shape)
        if tasks:
            write(key, value)
        if param in to_keep:
            means[mean_key(param)] = value.to(to_keep[param].dtype)
    return counts, means


def _values(
    plan: Plan, param: str, key: str, note: Callable[[str, Tensor], object]
) -> Iterator[Tensor]:
    """Yield the new values, flattened, piece by piece; ``note`` takes every piece that is read, by
    its model.

    A mean is yielded in float32 at least: the result rounds it once, and the state does not.
    """
    base, merged, dtype = plan.base, plan.merged, plan.dtype(key)
    averaged = param in plan.averaged
    joining = plan.joining(param)
    models = list(joining.values())
    if merged is not None:
        models.append(merged)
    numel = math.prod(base.tensors[key].shape)
    length = _piece_length([base.tensors[key].unit, *(model.unit(param) for model in models)])
    for start in range(0, numel, length):
        stop = min(start + length, numel)
        theta_0 = base.elements(key, start, stop)
        note("base", theta_0)
        theta_0 = theta_0.to(dtype)
        value = theta_0
        if merged is not None:
            so_far = merged.elements(param, start, stop, theta_0)
            note("merged", so_far)
            value = so_far.to(dtype)
            if averaged and plan.state is not None and mean_key(param) in plan.state.keys:
                kept = plan.state.keys[mean_key(param)]
                value = plan.state.source.elements(kept, start, stop).to(so_far.device)
                note("state", value)
                _check_belongs(plan, param, value, so_far)
        if averaged:
            for count, (source, task) in enumerate(joining.items(), plan.models_in_mean(param) + 1):
                new = task.elements(param, start, stop, theta_0)
                note(source, new)
                if not is_finite(new):
                    raise ValueError(
                        f"model '{task.source.name}', tensor '{param}' has NaN or infinite values"
                    )
                value = running_mean(value, task.at_strength(new, theta_0), count)  # type: ignore[arg-type]
            if not is_finite(value.to(dtype)):
                raise ValueError(f"tensor '{param}': the mean has values that {dtype} can't hold")
        yield value


def _piece_length(units: Sequence[int]) -> int:
    """Return the length of the pieces of a tensor, which cut no unit of the largest size, so that
    none is decoded twice.
    """
    most = CHUNK_BYTES // 8
    largest = max(units)
    return most - most % largest if largest <= most else largest


def _check_belongs(plan: Plan, param: str, mean: Tensor, rounded: Tensor) -> None:
    """Refuse a mean in the state that is not the merged model's value once that has rounded it."""
    assert plan.state is not None
    is_rounded = rounded.dtype.itemsize < mean.dtype.itemsize
    if is_rounded and not torch.equal(mean.to(rounded.dtype), rounded):
        raise ValueError(
            f"'{plan.state.source.name}' does not belong to the weights beside it: '{param}' "
            "differs; remove it if the weights are right"
        )


def running_mean(mean: Tensor, new: Tensor, count: int) -> Tensor:
    r"""Return the mean of ``count`` tensors, given that of all but the last: :math:`m + (\theta -
    m) / \text{count}`.

    It is exact for the first tensor, and otherwise in float32 at least. Whoever goes on from it
    must keep it so: rounded to bfloat16, the mean of many tensors no longer moves.
    """
    if count == 1:
        return new
    wide = wide_dtype(mean)
    return torch.lerp(mean.to(wide), new.to(wide), 1 / count)
