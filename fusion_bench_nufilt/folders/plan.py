"""How folders are merged: the settings, the plan of a merge, and the state that its method keeps of the layers."""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from fusion_bench_nufilt.core.options import check_choices, check_seed, check_whole, option
from fusion_bench_nufilt.core.workers import check_devices
from fusion_bench_nufilt.layers import Coverage, TargetConfig
from fusion_bench_nufilt.methods import LayerMethod, State
from fusion_bench_nufilt.storage.manifest import STATE_FILE, Manifest, check_state
from fusion_bench_nufilt.storage.tensors import FLOATS, TensorInfo, dtype_name, make_header, read_header

from .architecture import Layer
from .checkpoint import Checkpoint
from .models import FullModel

_option = partial(option, panel="Machine")


@dataclass(frozen=True)
class Settings:
    """How folders are merged; the method has settings of its own. A value out of its range is a ValueError."""

    seed: int = _option(42, "Seed of the adapters' initialisation.", panel="Method")
    step: int | None = _option(
        None,
        "Number of the first task in the stream, from 1. If it is not given, it is one more than the manifest of the "
        "merged folder says, and 1 without a merged folder.",
    )
    accumulate: Literal["stored", "float32"] = _option(
        "stored",
        "What the merged layers are kept in between steps: stored means the base's dtype; float32 also writes them "
        "beside the model for the next merge, so that rounding does not add up.",
    )
    device: str = _option(
        "cpu",
        "Where to compute: cpu works on a layer per thread; cuda, or several such as cuda:0,cuda:1, on stacks of "
        "layers.",
    )
    max_memory: int | None = _option(
        None, "The most memory to hold, such as 4GB; fewer layers are then worked on at a time."
    )

    engine: Literal["local", "ray"] = _option(
        "local",
        "What computes the layers: local is this process; ray is a worker on every node of a Ray cluster, or on every "
        "GPU of it if device is cuda. This process alone writes, and the result is the same.",
    )
    address: str | None = _option(
        None,
        "Address of the Ray cluster, such as auto or 10.0.0.1:6379. If it is not given, it is the cluster that this "
        "machine belongs to, or else a new one on this machine alone.",
    )

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.step is not None:
            check_whole(self, "step", least=1, most=10**6)
        if self.max_memory is not None:
            check_whole(self, "max_memory", least=1, most=2**62)
        check_choices(self)
        if self.engine == "local":  # a cluster's workers have devices of their own
            check_devices(self.device)
            if self.address is not None:
                raise ValueError(f"address '{self.address}' is for engine=ray")
        elif self.device not in ("cpu", "cuda"):
            raise ValueError(f"device '{self.device}': engine=ray gives every worker a GPU by itself; say cuda, or cpu")

    @property
    def devices(self) -> list[torch.device]:
        """The devices that compute, all of one kind."""
        return [torch.device(name) for name in self.device.split(",")]

    @property
    def on_cpu(self) -> bool:
        """Whether layers are computed in this memory."""
        return self.devices[0].type == "cpu"

    @property
    def workers(self) -> int:
        """The number of batches of layers that this process works on at a time."""
        return torch.get_num_threads() if self.on_cpu else len(self.devices)


@dataclass
class Plan:
    """A merge whose models passed the checks on their headers."""

    pretrained: FullModel
    merged: FullModel | None  # what is merged so far; None means the base
    state: FullModel | None  # what the method kept of the layers beside `merged`
    tasks: list[FullModel]
    layers: list[Layer]  # merged by the method, in the base's order
    others: dict[str, tuple[str, ...]]  # the base's keys of every other tensor, by slot
    coverage: Coverage  # how much of the model the layers are
    origin: str  # where the layers are known from
    method: LayerMethod
    targets: TargetConfig
    settings: Settings
    before: Manifest  # of what is merged so far; empty if it has none
    warnings: list[str] = field(default_factory=list)

    @cached_property
    def averaged(self) -> set[str]:
        """The slots of ``others`` that the tasks change."""
        changed = self.targets.changes_others(self.first_step)
        return {slot for slot, keys in self.others.items() if changed and self.base.tensors[keys[0]].dtype in FLOATS}

    @property
    def base(self) -> Checkpoint:
        """The base's checkpoint, whose tensors, files and headers the result has."""
        return self.pretrained.checkpoint

    @property
    def models(self) -> dict[str, FullModel]:
        """All models by what they are to the merge, the base first."""
        named = {"base": self.pretrained, "merged": self.merged, "state": self.state}
        named |= {f"task {number}": task for number, task in enumerate(self.tasks)}
        return {source: model for source, model in named.items() if model is not None}

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints of all models, the base's first."""
        return [model.checkpoint for model in self.models.values()]

    def changed(self) -> list[str]:
        """Return the names of the models whose weights were written to since they were opened."""
        return [each.name for each in self.checkpoints if any(file.changed() for file in each.opened.values())]

    @property
    def names(self) -> list[str]:
        """The names of all tasks in the result, in merging order."""
        return [*self.before.get("tasks", []), *(task.checkpoint.label for task in self.tasks)]

    @property
    def first_step(self) -> int:
        """The number of the first task in the stream, from 1."""
        return self.settings.step or self.before.get("step", 0) + 1

    @property
    def last_step(self) -> int:
        """The number of tasks that the result holds."""
        return self.first_step + len(self.tasks) - 1

    @cached_property
    def keeps_state(self) -> bool:
        """Whether the result has a file with the state.

        A state that is the merged weight alone is kept only where the model has the weight in less than float32.
        """
        if not self.method.state_is_weight:
            return True
        return self.settings.accumulate == "float32" and any(self.dtype(layer).itemsize < 4 for layer in self.layers)

    def dtype(self, layer: Layer) -> torch.dtype:
        """Return the base's dtype of a layer."""
        return FLOATS[self.base.tensors[layer.keys[0]].dtype]

    def options(self) -> dict[str, Any]:
        """Return all options of the merge by name, the method's among them."""
        return {
            "method": self.method.name,
            **dataclasses.asdict(self.method.options),
            **dataclasses.asdict(self.targets),
            **{key: getattr(self.settings, key) for key in ("seed", "accumulate", "device")},
        }


def state_tensors(plan: Plan, layer: Layer) -> dict[str, tuple[str, Tensor]]:
    """Return the keys of a layer's state in the file, and tensors without numbers, by the names in the state."""
    if plan.method.state_is_weight:
        shape = plan.base.tensors[layer.keys[0]].shape
        return {"weight": (layer.keys[0], torch.empty(shape, dtype=torch.float32, device="meta"))}
    theta_0 = torch.empty(layer.view.shape, dtype=plan.dtype(layer), device="meta")
    state = plan.method.start(layer.name, theta_0)
    return {name: (f"{layer.name}.{name}", value) for name, value in state.items()}


def state_bytes(plan: Plan, layer: Layer) -> int:
    """Return the bytes that a layer's state takes in the file."""
    return sum(value.nbytes for _, value in state_tensors(plan, layer).values())


def state_layout(plan: Plan) -> tuple[bytes, dict[str, TensorInfo]]:
    """Return the header of the file, and where it has each tensor."""
    header = make_header(dict(pair for layer in plan.layers for pair in state_tensors(plan, layer).values()))
    return header, read_header(STATE_FILE, header)


def read_state(plan: Plan, layer: Layer) -> tuple[State, str]:
    """Read the state that an earlier merge kept of a layer, empty if it kept none, and the digest of what was read."""
    kept, state, digests = plan.state, {}, ""
    for name, (key, _) in state_tensors(plan, layer).items():
        slot = layer.slot if plan.method.state_is_weight else key
        if kept is not None and slot in kept.keys:
            state[name], found = kept.checkpoint.read(kept.keys[slot])
            check_state(plan.before, key, found, kept.checkpoint.file(kept.keys[slot]).path)
            digests += found
    return state, digests


def state_to_keep(plan: Plan, layer: Layer, state: State) -> dict[str, Tensor]:
    """Return the tensors of a layer's state by their keys in the file, whose shapes and dtypes they must have."""
    if plan.method.state_is_weight:
        state = {"weight": layer.view.part(state["weight"]).to(torch.float32)}
    tensors = {}
    for name, (key, like) in state_tensors(plan, layer).items():
        if (value := state[name]).shape != like.shape or value.dtype != like.dtype:
            after, before = (f"{each.dtype} {tuple(each.shape)}" for each in (value, like))
            what = f"'{name}' of its state is {after} after the last task and was {before} before the first"
            raise ValueError(f"method {plan.method.name}, layer '{layer.name}': {what}")
        tensors[key] = value
    return tensors


def check_state_tensors(plan: Plan) -> list[str]:
    """Refuse a state beside the merged model from which the method can't go on; return warnings."""
    if plan.merged is None:
        return []
    name, method, there = plan.merged.checkpoint.name, plan.method, plan.state.keys if plan.state else {}
    before, missing, known = plan.before.get("settings", {}), [], set()
    for layer in plan.layers:
        for key, like in state_tensors(plan, layer).values():
            slot = layer.slot if method.state_is_weight else key
            known.add(slot)
            if plan.state is None or slot not in there:
                missing.append(key)
                continue
            found, shape = plan.state.checkpoint.tensors[there[slot]], tuple(like.shape)
            if (found.dtype, found.shape) != (dtype_name(like), shape):
                but = f"{found.dtype} {found.shape} is not {str(like.dtype).removeprefix('torch.')} {shape}"
                advice = "as the base's layer would be; remove that folder if the weights beside it are right"
                raise ValueError(f"'{plan.state.checkpoint.name}', tensor '{slot}': {but}, {advice}")
    if method.state_is_weight:
        if before.get("accumulate") == "float32" and plan.settings.accumulate == "stored":
            return [f"'{name}' has the merged layers in float32; --accumulate float32 goes on from there"]
        if plan.keeps_state and missing and plan.before:
            return [f"'{name}' does not have all merged layers in float32: going on from the rounded ones"]
        return []
    others = sorted(there.keys() - known)
    if missing or others or before.get("method", method.name) != method.name:
        what = f"no '{missing[0]}'" if missing else f"'{others[0]}'" if others else "that of another method"
        own = f"{method.label} goes on from its own merges of the same layers only"
        raise ValueError(f"the merged model '{name}' has {what} in {STATE_FILE}: {own}")
    return []
