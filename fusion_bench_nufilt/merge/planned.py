"""The layers of a plan, as they are read from its models."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from fusion_bench_nufilt.methods.base import State
from fusion_bench_nufilt.models.architecture import Layer
from fusion_bench_nufilt.models.source import check_belongs
from fusion_bench_nufilt.nufilt.step import LowRank
from fusion_bench_nufilt.utils.tensors import FLOATS

from .engine import LayerSource, MergedLayer
from .memory import batches, layer_budget, layer_memory, solving_memory
from .output import Record
from .plan import Plan
from .state_file import state_tensors
from .strength import measure_strengths


class PlannedLayers(LayerSource[Layer]):
    """The layers of a plan, whose weights are read as they are merged."""

    def __init__(self, plan: Plan, strengths: Sequence[float] | None = None) -> None:
        """``strengths`` are those of the tasks, measured here by default."""
        self.plan = plan
        self._strengths = strengths
        self.method = plan.method
        self.devices = plan.settings.devices
        self.workers = plan.settings.workers
        self.first_step = plan.first_step
        self.memory_limit = layer_budget(plan)

    @cached_property
    def strengths(self) -> Sequence[float]:
        if self._strengths is not None:
            return self._strengths
        if not self.method.weighs_tasks:
            return [1.0] * len(self.plan.tasks)
        return measure_strengths(self.plan)

    def name(self, layer: Layer) -> str:
        return layer.name

    def shape(self, layer: Layer) -> tuple[int, ...]:
        return layer.view.shape

    def batches(self, layers: Sequence[Layer]) -> list[list[Layer]]:
        return list(batches(self.plan, layers))

    def memory(self, layer: Layer) -> int:
        return layer_memory(self.plan, layer)

    def solving_memory(self, layer: Layer) -> int:
        return solving_memory(self.plan, layer)

    def read(self, layer: Layer, device: torch.device) -> MergedLayer[Layer]:
        plan = self.plan
        key = layer.keys[0]
        weight, sha = plan.base.read(key, device)
        theta_0 = layer.view.matrix(weight.to(plan.dtype(key)))
        state, digests = self._read_state(layer, device)
        read = {"base": sha}
        if state:
            read["state"] = digests
        if plan.method.is_stateless:
            state = {"weight": self._weight_so_far(layer, theta_0, state, read)}
        elif not state:
            stack = plan.method.init_state([layer.name], theta_0[None])
            state = {name: value[0] for name, value in stack.items()}
        record: Record = {"param": layer.param, "written": [], "read": read, "reports": []}
        return MergedLayer(layer, theta_0, state, record)

    def _read_state(self, layer: Layer, device: torch.device) -> tuple[State, str]:
        """Read the state of a layer that an earlier merge kept, and its digest; both are empty if
        it kept none.
        """
        kept = self.plan.state
        state: State = {}
        digests = ""
        if kept is None:
            return state, digests
        for name, (_, param, like) in state_tensors(self.plan, layer).items():
            if param in kept.keys:
                value, digest = kept.source.read(kept.keys[param], device)
                state[name] = value.to(like.dtype)
                digests += digest
        return state, digests

    def _weight_so_far(
        self, layer: Layer, theta_0: Tensor, kept: State, read: dict[str, str]
    ) -> Tensor:
        """Return the merged weight before the first task, in the dtype in which it is kept."""
        plan = self.plan
        so_far = theta_0
        dtype = theta_0.dtype
        if plan.merged is not None:
            like = layer.view.part(theta_0)
            if not kept:
                weight, read["merged"] = plan.merged.weight(layer.param, like)
            else:
                weight = kept["weight"]
                info = plan.merged.source.tensors[plan.merged.keys[layer.param]]
                rounded = weight.to(FLOATS[info.dtype])
                stored, read["merged"] = plan.merged.weight(layer.param, rounded)
                assert isinstance(stored, Tensor)
                # The model has the same weight rounded, which tells a state of other weights.
                if rounded.dtype.itemsize < weight.dtype.itemsize:
                    assert plan.state is not None
                    check_belongs(weight, stored, layer.name, plan.state.source)
            assert isinstance(weight, Tensor)
            so_far = layer.view.matrix(weight)
        if kept or plan.keeps_state:
            dtype = torch.promote_types(dtype, torch.float32)
        return so_far.to(dtype)

    def task_name(self, number: int) -> str:
        return self.plan.tasks[number].source.name

    def read_task(self, number: int, merged: MergedLayer[Layer]) -> Tensor | LowRank | None:
        layer = merged.layer
        task = self.plan.tasks[number]
        if layer.param not in task.params:
            return None
        theta_0 = layer.view.part(merged.theta_0)
        weight, merged.record["read"][f"task {number}"] = task.weight(layer.param, theta_0)
        weight = task.at_strength(weight, theta_0)
        return layer.view.matrix(weight) if isinstance(weight, Tensor) else weight

    def as_stored(self, layer: Layer, weight: Tensor) -> Tensor:
        return layer.view.part(weight)

    def digests_read(self, layer: Layer) -> dict[str, str]:
        """Return the digests of what a layer is made from, by the model's role in the merge."""
        started = self.read(layer, torch.device("cpu"))
        theta_0 = layer.view.part(started.theta_0)
        digests: dict[str, str] = started.record["read"]
        for number, task in enumerate(self.plan.tasks):
            if layer.param in task.params:
                _, digests[f"task {number}"] = task.weight(layer.param, theta_0)
        return digests
