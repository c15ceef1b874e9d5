"""The tensors outside the merged layers: kept, the first task's or a mean, a bounded part at a
time; and those of heads, which are kept beside the merged model.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from safetensors.torch import save
from torch import Tensor

from fusion_bench_nufilt.models.source import check_belongs
from fusion_bench_nufilt.nufilt.low_rank import LowRank
from fusion_bench_nufilt.utils.manifest import mean_key, read_heads
from fusion_bench_nufilt.utils.tensors import (
    CHUNK_BYTES,
    FLOATS,
    TensorInfo,
    compute_dtype,
    is_finite,
)

from .kept_state import kept_state
from .output import Record
from .plan import Plan
from .planned import factors_by_key

log = logging.getLogger(__name__)
#: The warning about such a tensor, which is copied.
NOT_FINITE = "tensor '%s' has NaN or infinite values in the base, and so in the result"


class OtherParam:
    """A tensor outside the merged layers, and what the merge makes of it.

    The rule ``other_params`` tells which tasks join in: none, the first alone, or all. Their mean
    is what a task adds to what there is, as a method adds one to a layer. It is in float32 at least
    until all have joined; the result rounds it once, and the state keeps it as it is.
    """

    def __init__(self, plan: Plan, param: str, key: str) -> None:
        self.plan = plan
        self.param = param
        self.key = key  # in the base
        self.info = plan.base.tensors[key]
        self.numel = math.prod(plan.vocabulary.resized(param, self.info.shape))
        self.is_averaged = param in plan.averaged
        self.grows = param in plan.vocabulary.params
        self.tasks = plan.joining(param)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype between tasks."""
        return self.plan.dtype(self.key)

    @property
    def is_kept(self) -> bool:
        """Whether the result has the base's tensor as it is."""
        if self.info.dtype not in FLOATS:
            return True
        return not (self.is_averaged or self.plan.merged or self.grows)

    @property
    def piece_length(self) -> int:
        """The length of its pieces, which cut no unit of the largest size, so that none is decoded
        twice.
        """
        # FP8 is decoded by rows of blocks, MXFP4 and an adapter's stack by experts.
        units = [self.info.unit]
        units += [task.unit(self.param) for task in self.tasks.values()]
        if self.plan.merged is not None:
            units.append(self.plan.merged.unit(self.param))
        largest = max(units)
        # In elements, of which the widest, those of float64, have 8 bytes.
        longest = CHUNK_BYTES // 8
        return max(largest, longest - longest % largest)

    def piece(self, start: int, stop: int) -> Tensor:
        """Return the elements ``start`` to ``stop`` of the flattened tensor after the merge."""
        theta_0 = self._base(start, stop)
        value = self._value_so_far(start, stop, theta_0)
        if not self.is_averaged:
            return value
        count = self.plan.models_in_mean(self.param)
        for task in self.tasks.values():
            theta_t = task.elements(self.param, start, stop, theta_0)
            if not is_finite(theta_t):
                raise ValueError(
                    f"model '{task.source.name}', tensor '{self.param}' has NaN or infinite values"
                )
            count += 1
            scaled = task.scaled(theta_t, theta_0)
            assert isinstance(scaled, Tensor)
            value = running_mean(value, scaled, count)
        if not is_finite(value.to(self.dtype)):
            raise ValueError(
                f"tensor '{self.param}': the mean has values that {self.dtype} can't hold"
            )
        return value

    def _base(self, start: int, stop: int) -> Tensor:
        """Return the base's elements, which has the rows of new tokens as all other models do."""
        read = partial(self.plan.base.elements, self.key)
        if self.grows:
            return self.plan.vocabulary.elements(self.param, start, stop, self.dtype, read)
        return read(start, stop).to(self.dtype)

    def _value_so_far(self, start: int, stop: int, theta_0: Tensor) -> Tensor:
        """Return the elements before the first task: the merged model's, or the base's."""
        merged = self.plan.merged
        state = self.plan.state
        if merged is None:
            return theta_0
        rounded = merged.elements(self.param, start, stop, theta_0)
        if not self.is_averaged or state is None or mean_key(self.param) not in state.keys:
            return rounded.to(self.dtype)
        key = state.keys[mean_key(self.param)]
        matched = merged.matched_rows.get(self.param)
        if matched is None:
            mean = state.source.elements(key, start, stop).to(rounded.device)
        else:
            # It has the rows of the model beside it.
            def read(first: int, last: int, _: Tensor) -> Tensor:
                return state.source.elements(key, first, last)

            mean = matched.elements(start, stop, theta_0, read)
        # The model has the same mean rounded, which tells a state of other weights.
        dtype = FLOATS[merged.source.tensors[merged.keys[self.param]].dtype]
        if dtype.itemsize < mean.dtype.itemsize:
            check_belongs(mean, rounded.to(dtype), self.param, state.source)
        return mean


def running_mean(mean: Tensor, new: Tensor, count: int) -> Tensor:
    r"""Return the mean of ``count`` tensors, given that of all but the last: :math:`m + (\theta -
    m) / \text{count}`.

    It is exact for the first tensor, and otherwise in float32 at least. Whoever goes on from it
    must keep it so: rounded to bfloat16, the mean of many tensors no longer moves.
    """
    if count == 1:
        return new
    wide = compute_dtype(mean)
    return torch.lerp(mean.to(wide), new.to(wide), 1 / count)


Pieces = Iterator[tuple[TensorInfo, Tensor]]
"""Parts of tensors of the result, with the place of the whole; those of one follow each other."""


def pieces_of_other_param(
    plan: Plan, param: str, state_places: Mapping[str, TensorInfo], record: Record
) -> Pieces:
    """Yield a tensor outside the merged layers, under every key that the result has for it, and
    what the state has of it; note in its record what a manifest says of it.

    ``state_places`` has the places in the file of the state, by key.
    """
    if plan.is_adapter:
        if param in plan.saved_tensors:
            yield from _saved_pieces(plan, param)
        else:
            yield from _pieces_of_update(plan, param, record)
        return
    mean_place = state_places.get(mean_key(param))
    for key in plan.other_keys[param]:
        tensor = OtherParam(plan, param, key)
        place = plan.places[key]
        is_copy = tensor.is_kept and tensor.info.dtype == place.dtype
        if not tensor.numel:
            pieces = iter([(place, torch.empty(0, dtype=torch.uint8, device="cpu"))])
        elif is_copy and not tensor.info.is_quantised:
            pieces = _copied_pieces(tensor, place)
        else:
            pieces = _merged_pieces(tensor, place, mean_place)
            mean_place = None  # one of the keys of a tied tensor is enough
        all_finite = True
        for place_of_piece, piece in pieces:
            if place_of_piece is place and piece.is_floating_point():
                all_finite = all_finite and is_finite(piece)
            yield place_of_piece, piece
        if not all_finite:
            # In the record, so that a run that goes on has it in its manifest, too.
            record["not_finite"] = key
            log.warning(NOT_FINITE, key)


def _saved_pieces(plan: Plan, param: str) -> Pieces:
    """Yield what an adapter holds in full of a tensor outside the merged layers, all of it or the
    rows of some tokens.
    """
    saved = plan.saved_tensors[param]
    tensor = OtherParam(plan, param, plan.other_keys[param][0])
    parts = [(0, tensor.numel)]
    if saved.tokens is not None:
        width = tensor.numel // tensor.info.shape[0]
        parts = [(token * width, (token + 1) * width) for token in saved.tokens]
    for first, end in parts:
        for start, stop in _bounds(first, end, tensor.piece_length):
            value = tensor.piece(start, stop)
            for key in saved.keys:
                place = plan.places[key]
                yield place, _rounded(value, key, FLOATS[place.dtype])


def _pieces_of_update(plan: Plan, param: str, record: Record) -> Pieces:
    """Yield what adapters change of a tensor outside the merged layers: the factors of the update
    that the rule ``other_params`` makes of theirs.
    """
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    joining = plan.joining(param)
    count = plan.models_in_mean(param)
    if not joining:
        count = 1  # it stays as it was
    updates: list[tuple[LowRank, float]] = []  # with their parts in the mean
    models = {**joining}
    if plan.merged is not None and plan.merged.rank_of(param):
        models["merged"] = plan.merged
    total = count + len(joining)
    for role, model in models.items():
        if not model.rank_of(param):
            continue  # it has the base's, of which the update is zero
        update = model.weight(param, nothing)
        update = model.scaled(update, nothing)
        assert isinstance(update, LowRank)
        updates.append((update, count / total if role == "merged" else 1 / total))
    left = torch.cat([update.left * part for update, part in updates], dim=1)
    right = torch.cat([update.right for update, _ in updates])
    for key, value in factors_by_key(plan, param, LowRank(left, right), record).items():
        place = plan.places[key]
        yield place, _rounded(value, key, FLOATS[place.dtype])


def _copied_pieces(tensor: OtherParam, place: TensorInfo) -> Pieces:
    """Yield a tensor of the base as it is."""
    file = tensor.plan.base.opened[tensor.info.file]
    dtype = FLOATS.get(tensor.info.dtype, torch.uint8)
    for piece in file.chunks(tensor.info):
        yield place, piece.view(dtype)


def _merged_pieces(tensor: OtherParam, place: TensorInfo, mean_place: TensorInfo | None) -> Pieces:
    """Yield a merged tensor, and its mean for the state."""
    dtype = FLOATS[place.dtype]
    for start, stop in _bounds(0, tensor.numel, tensor.piece_length):
        value = tensor.piece(start, stop)
        if mean_place is not None:
            yield mean_place, value.to(FLOATS[mean_place.dtype])
        yield place, _rounded(value, tensor.key, dtype)


def _rounded(value: Tensor, key: str, dtype: torch.dtype) -> Tensor:
    """Return a value as the result has it; one that is too large for it is refused."""
    rounded = value.to(dtype)
    # What is infinite in the base stays so, with a warning; the dtype is not to blame.
    if not is_finite(rounded) and is_finite(value):
        raise ValueError(
            f"tensor '{key}' has values that {dtype} can't hold: choose another --dtype"
        )
    return rounded


def average_other_params(plan: Plan, write: Callable[[str, Tensor], object]) -> dict[str, Tensor]:
    """Average the tensors outside the merged layers in memory.

    ``write`` takes a key in the base and the new values; a tied tensor comes once. Return the means
    that the model rounds, by their keys in the state.
    """
    means = {}
    to_keep = kept_state(plan).means()
    for param, keys in plan.other_keys.items():
        if param not in plan.averaged:
            continue
        tensor = OtherParam(plan, param, keys[0])
        if not tensor.numel:
            continue
        bounds = _bounds(0, tensor.numel, tensor.piece_length)
        value = torch.cat([tensor.piece(start, stop) for start, stop in bounds])
        value = value.reshape(tensor.info.shape)
        if tensor.tasks:
            write(keys[0], value)
        if param in to_keep:
            means[to_keep[param].key] = value.to(to_keep[param].like.dtype)
    return means


def _bounds(start: int, stop: int, length: int) -> list[tuple[int, int]]:
    """Return where the pieces of a range begin and end."""
    return [(first, min(first + length, stop)) for first in range(start, stop, length)]


def head_files(plan: Plan) -> dict[str, bytes]:
    """Return the files of all heads by path in the result; those of earlier tasks come from the
    merged model.
    """
    files: dict[str, bytes] = {}
    if plan.merged is not None and plan.merged_manifest.get("heads"):
        folder = plan.merged.checkpoint.folder_with("heads/*")
        files |= read_heads(folder, plan.merged_manifest)
    return files | new_heads(plan)


def new_heads(plan: Plan) -> dict[str, bytes]:
    """Return the files of the heads of a merge's own tasks by path in the result."""
    earlier_heads = plan.merged_manifest.get("heads", {})
    names = [head["file"] for task, head in plan.heads.items() if task not in earlier_heads]
    tasks = [task for task in plan.tasks if task.head]
    return {name: save(task.head_tensors()) for name, task in zip(names, tasks, strict=True)}
