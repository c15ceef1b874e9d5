"""The tensors outside the merged layers: kept, the first task's or a mean, a bounded part at a
time.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from fusion_bench_nufilt.models.entries import Stored
from fusion_bench_nufilt.models.model import ModelWeights
from fusion_bench_nufilt.models.source import check_belongs
from fusion_bench_nufilt.utils.manifest import state_key
from fusion_bench_nufilt.utils.tensors import (
    CHUNK_BYTES,
    FLOATS,
    TensorInfo,
    in_dtype,
    is_finite,
)

from .basis import Basis, LayerInBasis
from .engine import Blocks, Job, LayerInProgress, Pieces, TaskInput
from .layer_jobs import pieces_of_factors
from .output import Record
from .plan import Plan
from .rules import RULES, Keep

log = logging.getLogger(__name__)
#: The warning about such a tensor, which is copied.
NOT_FINITE = "tensor '%s' has NaN or infinite values in the base, and so in the result"


class _Tensor:
    """A tensor outside the merged layers, of which blocks are merged by the rule ``other_params``:
    no task joins in, the first alone, or all.
    """

    def __init__(self, plan: Plan, param: str, key: str, places: Sequence[TensorInfo]) -> None:
        self.plan = plan
        self.param = param
        self.key = key  # in the base
        self.places = places  # in the result and its state
        self.info = plan.base.tensors[key]
        self.of_base = plan.pretrained.entries[param]
        self.is_averaged = param in plan.averaged
        self.tasks = plan.joining(param)
        self.rule = (RULES[plan.targets.other_params] if self.is_averaged else Keep)(None, ())
        dtypes = {place.dtype for place in places}
        # Its bytes are copied, whatever they hold.
        self.is_copied = self._is_kept and dtypes == {self.info.dtype}
        self.numel = math.prod(self.of_base.shape)
        if self.is_copied:
            self.numel = self.info.nbytes

    @property
    def _is_kept(self) -> bool:
        """Whether the result has the base's tensor as it is."""
        if self.info.is_quantised:
            return False
        if self.info.dtype not in FLOATS:
            return True
        return isinstance(self.of_base, Stored) and not (self.is_averaged or self.plan.merged)

    @property
    def length(self) -> int:
        """The length of its blocks, which cut no unit of the largest size, so that none is decoded
        twice.
        """
        if self.is_copied:
            return CHUNK_BYTES
        # FP8 is decoded by rows of blocks, MXFP4 and an adapter's stack by experts.
        units = [self.info.unit]
        for model in (*self.tasks, self.plan.merged):
            if model is not None:
                units.append(model.entries[self.param].unit)
        largest = max(units)
        # In elements, of which the widest, those of float64, have 8 bytes.
        longest = CHUNK_BYTES // 8
        return max(largest, longest - longest % largest)

    def jobs(self, ranges: Sequence[tuple[int, int]], record: Record) -> Iterator[Job]:
        """Yield the jobs that merge ranges of the flattened tensor in blocks, which may add to the
        tensor's record.
        """
        length = self.length
        for start, stop in ranges:
            # A tensor without elements has one block without any.
            for first in range(start, max(stop, start + 1), length):
                yield self._job(first, min(first + length, stop), record)

    def _job(self, start: int, stop: int, record: Record) -> Job:
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
            pieces=lambda merged, merged_weight: self._pieces(merged_weight(), record),
        )

    def _read(self, start: int, stop: int, job: Job, device: torch.device) -> LayerInProgress:
        theta_0 = self._base(start, stop, device)
        state = job.rule.state_of(job.name, self._so_far(start, stop, theta_0))
        return LayerInProgress(job, theta_0, state, {"reports": []})

    def _base(self, start: int, stop: int, device: torch.device) -> Tensor:
        if self.is_copied:
            file = self.plan.base.opened[self.info.file]
            first = self.info.start
            stored = file.read_bytes(first + start, first + stop)
            return stored.view(FLOATS.get(self.info.dtype, torch.uint8))
        nothing = torch.empty(0, dtype=torch.float32, device=device)
        theta_0 = self.of_base.elements(start, stop, nothing)
        # A row of a new token may have more digits.
        dtype = torch.promote_types(theta_0.dtype, self.plan.dtype(self.key))
        return theta_0.to(dtype)

    def _so_far(self, start: int, stop: int, theta_0: Tensor) -> Tensor:
        """Return the elements before the first task: the merged model's, or the base's."""
        merged = self.plan.merged
        state = self.plan.state
        if merged is None or self.is_copied:
            return theta_0
        rounded = merged.entries[self.param].elements(start, stop, theta_0)
        if not self.is_averaged or state is None or state_key(self.param) not in state.entries:
            return rounded.to(theta_0.dtype)
        mean = state.entries[state_key(self.param)].elements(start, stop, theta_0)
        check_belongs(mean, rounded.to(merged.entries[self.param].dtype), self.param, state.source)
        return mean

    def _read_task(
        self, task: ModelWeights, start: int, stop: int, merged: LayerInProgress
    ) -> Tensor:
        theta_t = task.entries[self.param].elements(start, stop, merged.theta_0)
        if not is_finite(theta_t):
            raise ValueError(
                f"model '{task.source.name}', tensor '{self.param}' has NaN or infinite values"
            )
        return theta_t

    def _pieces(self, block: Tensor, record: Record) -> Pieces:
        # What is infinite in the base stays so, and no dtype is to blame.
        stays = block.is_floating_point() and not is_finite(block)
        if stays and "not_finite" not in record:
            # In the record, so that a run that goes on has it in its manifest, too.
            record["not_finite"] = self.key
            log.warning(NOT_FINITE, self.key)
        for place in self.places:
            dtype = FLOATS.get(place.dtype, block.dtype)
            if stays or dtype == block.dtype:
                yield place, block.to(dtype)
            else:
                yield place, in_dtype(self.key, block, dtype)


def other_tensors(
    plan: Plan, params: Iterable[str], places: Mapping[str, TensorInfo]
) -> list[Blocks]:
    """Return the tensors outside the merged layers as they are written, each to all of its places,
    which are given by the base's keys, and that of its mean in the state by its key there.
    """
    tensors = []
    for param in params:
        keys = plan.other_keys[param]
        numel = sum(math.prod(plan.base.tensors[key].shape) for key in keys)
        record = Record(param=param, written=[], reports=[])
        jobs = _jobs(plan, param, record, places)
        if param in plan.adapter_keys:
            jobs = iter([_job_of_update(plan, param, record, places)])
        tensors.append(Blocks(record, numel, jobs, plan.base.device(keys[0])))
    return tensors


def _jobs(
    plan: Plan, param: str, record: Record, places: Mapping[str, TensorInfo]
) -> Iterator[Job]:
    """Yield the jobs of each of the base's tensors of a param: of all of it, or for an adapter of
    the rows of some tokens.
    """
    saved = plan.saved_tensors.get(param)
    if saved is not None:
        places_of_all = [places[key] for key in saved.keys]
        tensor = _Tensor(plan, param, plan.other_keys[param][0], places_of_all)
        ranges = [(0, tensor.numel)]
        if saved.tokens is not None:
            width = tensor.numel // tensor.info.shape[0]
            ranges = [(token * width, (token + 1) * width) for token in saved.tokens]
        yield from tensor.jobs(ranges, record)
        return
    in_state = [state_key(param)]
    for key in plan.other_keys[param]:
        places_of_key = [places[name] for name in (*in_state, key) if name in places]
        tensor = _Tensor(plan, param, key, places_of_key)
        yield from tensor.jobs([(0, tensor.numel)], record)
        in_state = []  # one of the keys of a tied tensor is enough


def _job_of_update(plan: Plan, param: str, record: Record, places: Mapping[str, TensorInfo]) -> Job:
    """Return the job of what adapters change of a tensor outside the merged layers: the factors of
    the update that the rule ``other_params`` makes of theirs.
    """
    return Job(
        name=param,
        rule=Keep(None, ()),
        read=partial(_read_update, plan, record),
        tasks=(),
        first_step=1,
        pieces=lambda merged, merged_weight: pieces_of_factors(
            plan, merged, merged_weight(), places
        ),
    )


def _read_update(plan: Plan, record: Record, job: Job, device: torch.device) -> LayerInBasis:
    joining = plan.joining(job.name)
    # Without a task that joins in, it stays as it was.
    count = plan.models_in_mean(job.name) if joining else 1
    total = count + len(joining)
    parts_of_mean = [(task, 1 / total) for task in joining]
    if plan.merged is not None:
        parts_of_mean.append((plan.merged, count / total))
    lefts = []
    rights = []
    for model, part in parts_of_mean:
        if model.entries[job.name].rank:  # else it has the base's, of which the update is zero
            update = model.factors(job.name, device)
            lefts.append(update.left * part)
            rights.append(update.right)
    left = torch.cat(lefts, dim=1)
    right = torch.cat(rights)
    return LayerInBasis(job, right, {"weight": right}, record, Basis(left, None), {})
