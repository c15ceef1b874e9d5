"""The tensors outside the merged layers: kept, the first task's or a mean, a bounded part at a
time; and those of heads, which are kept beside the merged model.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from safetensors.torch import save
from torch import Tensor

from fusion_bench_nufilt.models.model import ModelWeights
from fusion_bench_nufilt.models.source import check_belongs
from fusion_bench_nufilt.nufilt.low_rank import LowRank
from fusion_bench_nufilt.utils.manifest import read_heads, state_key
from fusion_bench_nufilt.utils.tensors import (
    CHUNK_BYTES,
    FLOATS,
    TensorInfo,
    is_finite,
)

from .engine import Blocks, Job, MergedLayer, Pieces, TaskInput
from .kept_state import KeptState
from .output import Record
from .plan import Plan
from .planned import factors_by_key
from .rules import RULES, Keep

log = logging.getLogger(__name__)
#: The warning about such a tensor, which is copied.
NOT_FINITE = "tensor '%s' has NaN or infinite values in the base, and so in the result"


Merge = Callable[[Job], Pieces]
"""Does the job of a block, and returns what is written of it."""


class _Tensor:
    """A tensor outside the merged layers, of which blocks are merged by the rule ``other_params``:
    no task joins in, the first alone, or all.
    """

    def __init__(self, plan: Plan, param: str, key: str) -> None:
        self.plan = plan
        self.param = param
        self.key = key  # in the base
        self.info = plan.base.tensors[key]
        self.numel = math.prod(plan.vocabulary.resized(param, self.info.shape))
        self.is_averaged = param in plan.averaged
        self.grows = param in plan.vocabulary.params
        self.tasks = plan.joining(param).values()
        self.rule = (RULES[plan.targets.other_params] if self.is_averaged else Keep)(None, ())

    @property
    def is_kept(self) -> bool:
        """Whether the result has the base's tensor as it is."""
        if self.info.dtype not in FLOATS:
            return True
        return not (self.is_averaged or self.plan.merged or self.grows)

    @property
    def length(self) -> int:
        """The length of its blocks, which cut no unit of the largest size, so that none is decoded
        twice.
        """
        # FP8 is decoded by rows of blocks, MXFP4 and an adapter's stack by experts.
        units = [self.info.unit]
        units += [task.unit(self.param) for task in self.tasks]
        if self.plan.merged is not None:
            units.append(self.plan.merged.unit(self.param))
        largest = max(units)
        # In elements, of which the widest, those of float64, have 8 bytes.
        longest = CHUNK_BYTES // 8
        return max(largest, longest - longest % largest)

    def job(self, start: int, stop: int, pieces: Callable[[Tensor], Pieces]) -> Job:
        """Return the job that merges the elements ``start`` to ``stop`` of the flattened tensor,
        given what is written of them.
        """
        tasks = []
        for task in self.tasks:
            read = partial(self._read_task, task, start, stop)
            tasks.append(TaskInput(task.source.name, read, coefficient=task.coefficient))
        return Job(
            name=self.param,
            rule=self.rule,
            read=partial(self._read, start, stop),
            tasks=tasks,
            # A step of a mean is a model in it.
            first_step=self.plan.models_in_mean(self.param) + 1,
            pieces=lambda merged, merged_weight: pieces(merged_weight()),
        )

    def _read(self, start: int, stop: int, job: Job, device: torch.device) -> MergedLayer:
        theta_0 = self._base(start, stop)
        stack = job.rule.init_state(self._so_far(start, stop, theta_0)[None])
        state = {name: value[0] for name, value in stack.items()}
        return MergedLayer(job, theta_0, state, {"reports": []})

    def _base(self, start: int, stop: int) -> Tensor:
        """Return the base's elements, which has the rows of new tokens as all other models do."""
        dtype = self.plan.dtype(self.key)
        read = partial(self.plan.base.elements, self.key)
        if self.grows:
            return self.plan.vocabulary.elements(self.param, start, stop, dtype, read)
        return read(start, stop).to(dtype)

    def _so_far(self, start: int, stop: int, theta_0: Tensor) -> Tensor:
        """Return the elements before the first task: the merged model's, or the base's."""
        merged = self.plan.merged
        state = self.plan.state
        if merged is None:
            return theta_0
        rounded = merged.elements(self.param, start, stop, theta_0)
        if not self.is_averaged or state is None or state_key(self.param) not in state.keys:
            return rounded.to(theta_0.dtype)
        key = state.keys[state_key(self.param)]
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

    def _read_task(self, task: ModelWeights, start: int, stop: int, merged: MergedLayer) -> Tensor:
        theta_t = task.elements(self.param, start, stop, merged.theta_0)
        if not is_finite(theta_t):
            raise ValueError(
                f"model '{task.source.name}', tensor '{self.param}' has NaN or infinite values"
            )
        return theta_t


def tensors_in_files(kept: KeptState, params: Sequence[str]) -> list[Blocks]:
    """Return the tensors outside the merged layers as they are written to files, under every key
    that the result has for each, with what the state has of it.
    """
    plan = kept.plan
    _, state_places = kept.layout()
    tensors = []
    for param in params:
        numel = sum(math.prod(plan.base.tensors[key].shape) for key in plan.other_keys[param])
        pieces = partial(_pieces_in_files, plan, param, state_places)
        if param in plan.adapter_keys:
            pieces = partial(_pieces_of_update, plan, param)
        tensors.append(Blocks(param, numel, pieces))
    return tensors


def _pieces_in_files(
    plan: Plan, param: str, state_places: Mapping[str, TensorInfo], merge: Merge, record: Record
) -> Pieces:
    mean_place = state_places.get(state_key(param))
    for tensor, places, ranges in _written(plan, param):
        dtypes = {place.dtype for place in places}
        if not tensor.numel:
            pieces: Pieces = [
                (place, torch.empty(0, dtype=torch.uint8, device="cpu")) for place in places
            ]
        elif tensor.is_kept and not tensor.info.is_quantised and dtypes == {tensor.info.dtype}:
            pieces = _copied_pieces(tensor, places)
        else:
            pieces = _merged_pieces(tensor, places, ranges, mean_place, merge)
            mean_place = None  # one of the keys of a tied tensor is enough
        all_finite = True
        for place, piece in pieces:
            if place in places and piece.is_floating_point():
                all_finite = all_finite and is_finite(piece)
            yield place, piece
        if not all_finite:
            # In the record, so that a run that goes on has it in its manifest, too.
            record["not_finite"] = tensor.key
            log.warning(NOT_FINITE, tensor.key)


def _written(
    plan: Plan, param: str
) -> Iterator[tuple[_Tensor, list[TensorInfo], list[tuple[int, int]]]]:
    """Yield each of the base's tensors of a param, where the result has it, and the elements that
    it has: all, or of an adapter the rows of some tokens.
    """
    saved = plan.saved_tensors.get(param)
    if saved is None:
        for key in plan.other_keys[param]:
            tensor = _Tensor(plan, param, key)
            yield tensor, [plan.places[key]], [(0, tensor.numel)]
        return
    tensor = _Tensor(plan, param, plan.other_keys[param][0])
    ranges = [(0, tensor.numel)]
    if saved.tokens is not None:
        width = tensor.numel // tensor.info.shape[0]
        ranges = [(token * width, (token + 1) * width) for token in saved.tokens]
    yield tensor, [plan.places[key] for key in saved.keys], ranges


def _copied_pieces(tensor: _Tensor, places: Sequence[TensorInfo]) -> Pieces:
    """Yield a tensor of the base as it is."""
    file = tensor.plan.base.opened[tensor.info.file]
    dtype = FLOATS.get(tensor.info.dtype, torch.uint8)
    for piece in file.chunks(tensor.info):
        for place in places:
            yield place, piece.view(dtype)


def _merged_pieces(
    tensor: _Tensor,
    places: Sequence[TensorInfo],
    ranges: Sequence[tuple[int, int]],
    mean_place: TensorInfo | None,
    merge: Merge,
) -> Pieces:
    """Yield some elements of a merged tensor, and its mean for the state."""

    def written(value: Tensor) -> Pieces:
        if mean_place is not None:
            yield mean_place, value.to(FLOATS[mean_place.dtype])
        for place in places:
            yield place, _rounded(value, tensor.key, FLOATS[place.dtype])

    yield from _merged_blocks(tensor, ranges, written, merge)


def _merged_blocks(
    tensor: _Tensor,
    ranges: Sequence[tuple[int, int]],
    pieces: Callable[[Tensor], Pieces],
    merge: Merge,
) -> Pieces:
    """Yield the pieces of some elements of a merged tensor, a bounded number at a time."""
    for start, stop in ranges:
        for first in range(start, stop, tensor.length):
            last = min(first + tensor.length, stop)
            yield from merge(tensor.job(first, last, pieces))


def _pieces_of_update(plan: Plan, param: str, merge: Merge, record: Record) -> Pieces:
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


def _rounded(value: Tensor, key: str, dtype: torch.dtype) -> Tensor:
    """Return a value as the result has it; one that is too large for it is refused."""
    rounded = value.to(dtype)
    # What is infinite in the base stays so, with a warning; the dtype is not to blame.
    if not is_finite(rounded) and is_finite(value):
        raise ValueError(
            f"tensor '{key}' has values that {dtype} can't hold: choose another --dtype"
        )
    return rounded


def tensors_in_memory(
    kept: KeptState,
    write: Callable[[str, Tensor], object],
    write_state: Callable[[str, Tensor], object],
) -> list[Blocks]:
    """Return the tensors outside the merged layers that a merge of models in memory changes, a tied
    one once.

    The place of a piece is the function to call with its key and the piece: ``write`` for a tensor,
    and ``write_state`` for a mean that the model rounds, by its key in the state.
    """
    plan = kept.plan
    means = kept.means()
    tensors = []
    for param, keys in plan.other_keys.items():
        tensor = _Tensor(plan, param, keys[0])
        if tensor.is_averaged and tensor.numel and tensor.tasks:
            device = plan.base.elements(tensor.key, 0, 1).device
            pieces = partial(_pieces_in_memory, tensor, means.get(param), write, write_state)
            tensors.append(Blocks(param, tensor.numel, pieces, device))
    return tensors


def _pieces_in_memory(
    tensor: _Tensor,
    kept: Tensor | None,
    write: Callable[[str, Tensor], object],
    write_state: Callable[[str, Tensor], object],
    merge: Merge,
    record: Record,
) -> Pieces:
    merged = _merged_blocks(tensor, [(0, tensor.numel)], lambda value: [("", value)], merge)
    value = torch.cat([block for _, block in merged]).reshape(tensor.info.shape)
    yield (write, tensor.key), value
    if kept is not None:
        yield (write_state, state_key(tensor.param)), value.to(kept.dtype)


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
