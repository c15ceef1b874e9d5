"""What a merge keeps beside its model for the next one, in float32 at least: what the method keeps
of each layer (for NUFILT, the layer itself), and the running means of tensors outside the layers,
where the model rounds them.

:class:`KeptState` alone decides what these tensors are called, and which shapes and dtypes they
have. It reads those of an earlier merge, and makes those of this one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusion_bench_nufilt.methods.base import LayerMethod, State
from fusion_bench_nufilt.methods.registry import METHODS
from fusion_bench_nufilt.models.architecture import Architecture
from fusion_bench_nufilt.models.checkpoint import Checkpoint
from fusion_bench_nufilt.models.layers import Layer
from fusion_bench_nufilt.models.model import ModelWeights
from fusion_bench_nufilt.models.source import format_names
from fusion_bench_nufilt.nufilt.low_rank import LowRank
from fusion_bench_nufilt.utils.files import Manifest
from fusion_bench_nufilt.utils.manifest import STATE_FILE, mean_key
from fusion_bench_nufilt.utils.tensors import TensorInfo, describe, make_header, read_header

from .basis import LayerInBasis, along_axes, resize_lists
from .plan import Plan, is_rounded


class KeptTensor(NamedTuple):
    """A tensor of the state."""

    key: str  # in the file that this merge writes
    param: str  # by which it is found in what an earlier merge kept
    like: Tensor  # has its shape and dtype, and no values: it is on the meta device


class KeptState:
    """The state of a merge of models, whose layers it has in their own outputs and inputs."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.method = plan.method
        self._of_layers: dict[str, dict[str, KeptTensor]] = {}

    # Which tensors it has

    def of_layer(self, layer: Layer) -> dict[str, KeptTensor]:
        """Return the tensors of a layer's state, by their names in the method's."""
        # As often as a layer is batched, read and written.
        if layer.param not in self._of_layers:
            self._of_layers[layer.param] = self._tensors_of(layer)
        return self._of_layers[layer.param]

    def _tensors_of(self, layer: Layer) -> dict[str, KeptTensor]:
        if self.method.is_stateless:
            key = layer.keys[0]
            return {"weight": KeptTensor(key, layer.param, self._wide(key))}
        dtype = self.plan.dtype(layer.keys[0])
        tensors = {}
        for name, like in self._method_state(layer, layer.view.shape, dtype).items():
            key = f"{layer.name}.{name}"
            tensors[name] = KeptTensor(key, key, like)
        return tensors

    def _method_state(self, layer: Layer, shape: tuple[int, int], dtype: torch.dtype) -> State:
        """Return what the method keeps of a layer of a shape, on the meta device, where it takes no
        memory.
        """
        base = torch.empty((1, *shape), dtype=dtype, device="meta")
        stack = self.method.for_stack([layer.name]).init_state(base)
        return {name: value[0] for name, value in stack.items()}

    def _wide(self, key: str) -> Tensor:
        """Return the like of a tensor of the base in float32 at least."""
        dtype = torch.promote_types(self.plan.dtype(key), torch.float32)
        return torch.empty(self.plan.base.tensors[key].shape, dtype=dtype, device="meta")

    def is_needed(self, layer: Layer) -> bool:
        """Tell whether a layer has a state that the result's weight does not tell by itself."""
        return not self.method.is_stateless or self.plan.rounds(layer.keys[0])

    def means(self) -> dict[str, KeptTensor]:
        """Return the running means that the model alone would round, by param."""
        plan = self.plan
        if plan.targets.other_params != "mean":
            return {}
        means = {}
        for param, keys in plan.other_keys.items():
            if param in plan.averaged and plan.rounds(keys[0]):
                key = mean_key(param)
                like = self._wide(keys[0])
                shape = plan.vocabulary.resized(param, like.shape)
                means[param] = KeptTensor(key, key, like.new_empty(shape))
        return means

    def needed(self) -> list[KeptTensor]:
        """Return all that the model does not tell by itself, in the order of the file."""
        tensors: list[KeptTensor] = []
        for layer in self.plan.layers:
            if self.is_needed(layer):
                tensors += self.of_layer(layer).values()
        tensors += self.means().values()
        return tensors

    def layout(self) -> tuple[bytes, dict[str, TensorInfo]]:
        """Return the header and the tensors of the file, which are empty if there is none."""
        tensors: dict[str, TensorInfo] = {}
        if self.plan.keeps_state:
            for tensor in self.needed():
                tensors[tensor.key] = describe(tensor.like)
        if not tensors:
            return b"", {}
        header = make_header(tensors)
        return header, read_header(STATE_FILE, header)

    def shape_in_basis(self, layer: Layer) -> tuple[int, int] | None:
        """Return the shape of a layer in the basis of its tasks' factors, in which it is merged, or
        None for one that is merged as it is.
        """
        plan = self.plan
        sides = self.method.sides_in_basis
        # What earlier tasks made of a layer has no factors.
        if "o" not in sides or plan.merged is not None or plan.state is not None:
            return None
        num_directions = 0
        for task in plan.tasks:
            rank = task.rank_of(layer.param)
            if rank is None:
                return None
            num_directions += rank
        d_o, d_i = layer.view.shape
        # With as many directions as the layer, a basis saves nothing.
        if not 0 < num_directions < min(d_o, d_i):
            return None
        return num_directions, num_directions if "i" in sides else d_i

    # What an earlier merge kept

    def earlier_keys(self) -> dict[str, str]:
        """Return the keys of what is kept beside the merged model, by the keys that this merge has
        for the same tensors.
        """
        plan = self.plan
        stored = plan.state.keys if plan.state else {}
        params = {}  # by which the state has each tensor, by the key that this merge has for it
        if plan.targets.other_params == "mean":
            params = {mean_key(param): mean_key(param) for param in plan.other_keys}
        for layer in plan.layers:
            for tensor in self.of_layer(layer).values():
                params[tensor.key] = tensor.param
        return {key: stored[param] for key, param in params.items() if param in stored}

    def read(self, layer: Layer, device: torch.device) -> State:
        """Read the state of a layer that an earlier merge kept, which is empty if it kept none."""
        earlier = self.plan.state
        state: State = {}
        if earlier is None:
            return state
        for name, tensor in self.of_layer(layer).items():
            if tensor.param in earlier.keys:
                value = earlier.source.read(earlier.keys[tensor.param], device)
                # A method may write to it, and what lies in memory is the caller's.
                state[name] = value.to(tensor.like.dtype, copy=earlier.source.in_memory)
        return state

    def has_state(self, layer: Layer) -> bool:
        """Tell whether an earlier merge kept a state of a layer."""
        stored = self.plan.state.keys if self.plan.state else {}
        return any(tensor.param in stored for tensor in self.of_layer(layer).values())

    def read_directions(self, layer: Layer, device: torch.device) -> tuple[LowRank | None, State]:
        """Read the directions of the tasks that are merged into a layer, as two factors, and the
        state in them, of which a layer that is merged in a basis has none here.
        """
        return None, {}

    def turn(self, layer: Layer, state: State, likes: State, directions: LowRank) -> State:
        """Return a state that was kept, in bases that have its directions ``(m, r)`` and
        ``(r, n)``.

        ``likes`` is the state before the first task in these bases.
        """
        if self.method.is_stateless:
            return {"weight": directions.product()}
        turns = {
            "o": directions.left[:, : state["outputs"].shape[1]],
            "i": directions.right[: state["inputs"].shape[1]].mT,
        }
        turned = {}
        for name, like in likes.items():
            axes = self.method.state_axes.get(name, "")
            value = resize_lists(state[name], axes, min(layer.view.shape))
            turned[name] = along_axes(value, axes, turns).to(like.dtype)
        return turned

    def check(self, name: str) -> list[str]:
        """Check that the method can go on from what is kept beside the merged model of this name,
        and return warnings.
        """
        plan = self.plan
        method = self.method
        stored: dict[str, str] = {}
        if plan.state is not None:
            stored = plan.state.keys
        missing = []
        expected = {mean_key(param) for param in plan.other_keys}
        for layer in plan.layers:
            for tensor in self.of_layer(layer).values():
                expected.add(tensor.param)
                if tensor.param in stored:
                    self._check_like(tensor, tuple(tensor.like.shape))
                # A weight that the model has in float32 needs no second copy beside it.
                elif not method.is_stateless or self._is_rounded(tensor.param):
                    missing.append(tensor.key)
        rounded_means = []
        for param, tensor in self.means().items():
            if tensor.param in stored:
                self._check_like(tensor, self._shape_before(param))
            elif self._is_rounded_mean(param):
                rounded_means.append(param)
        unknown = sorted(stored.keys() - expected)
        warnings = []
        if method.is_stateless:
            if plan.keeps_state and missing and plan.merged_manifest:
                warnings.append(
                    f"'{name}' does not have all merged layers in float32: going on from the "
                    "rounded ones"
                )
        elif missing or unknown:
            # Sums of other layers, or of another method, are not those of these tasks.
            content = f"no '{missing[0]}'" if missing else f"'{unknown[0]}'"
            raise ValueError(
                f"the merged model '{name}' has {content} in {STATE_FILE}: {method.label} goes on "
                "from its own merges of the same layers only"
            )
        warnings += _warn_of_means(name, rounded_means, "--state from the first merge on")
        return warnings

    def _shape_before(self, param: str) -> tuple[int, ...]:
        """Return the shape that a tensor has in the merged model, or else in the base."""
        merged = self.plan.merged
        if merged is not None and param in merged.keys:
            return merged.source.tensors[merged.keys[param]].shape
        pretrained = self.plan.pretrained
        return pretrained.source.tensors[pretrained.keys[param]].shape

    def _check_like(self, tensor: KeptTensor, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that was kept in another shape or dtype than the plan needs."""
        earlier = self.plan.state
        assert earlier is not None
        stored = earlier.source.tensors[earlier.keys[tensor.param]]
        if stored.shape != shape or stored.dtype != describe(tensor.like).dtype:
            dtype = str(tensor.like.dtype).removeprefix("torch.")
            raise ValueError(
                f"'{earlier.source.name}', tensor '{tensor.param}': {stored.dtype} {stored.shape} "
                f"is not {dtype} {shape}, as the base's layer would be; remove that folder if the "
                "weights beside it are right"
            )

    def _is_rounded(self, param: str) -> bool:
        """Tell whether the merged model has a tensor in fewer digits than float32."""
        merged = self.plan.merged
        if merged is None:
            return self.plan.rounds(self.plan.pretrained.keys[param])
        return is_rounded(merged.source.tensors[merged.keys[param]])

    def _is_rounded_mean(self, param: str) -> bool:
        """Tell whether the merged model has the mean of a tensor in fewer digits than float32."""
        merged = self.plan.merged
        # A mean without a model in it is replaced by the first one, so that its digits don't count.
        if self.plan.models_in_mean(param) == 0:
            return False
        if merged is not None and param not in merged.keys:
            return False  # it has the base's
        return self._is_rounded(param)

    # What this merge keeps

    def expand(self, layer: Layer, merged: LayerInBasis, weight: Tensor) -> State:
        """Return the state of a layer that was merged in a basis as it is kept; its merged weight
        is given as it is stored.
        """
        if self.method.is_stateless:
            return {"weight": layer.view.matrix(weight)}
        state = {}
        for name, tensor in self.of_layer(layer).items():
            value = merged.basis.expand(merged.state[name], self.method.state_axes.get(name, ""))
            state[name] = value.to(tensor.like.dtype)
        return state

    def by_key(self, layer: Layer, state: State) -> dict[str, Tensor]:
        """Return a layer's state by its keys in the file, which has a place for these shapes and
        dtypes alone.
        """
        tensors = {}
        for name, tensor in self.of_layer(layer).items():
            value = self._as_kept(layer, state[name], tensor.like)
            # The header of the file is made from the state that a method starts with.
            if value.shape != tensor.like.shape or value.dtype != tensor.like.dtype:
                raise ValueError(
                    f"method {self.method.name}, layer '{layer.name}': '{name}' of its state is "
                    f"{value.dtype} {tuple(value.shape)} after the last task and was "
                    f"{tensor.like.dtype} {tuple(tensor.like.shape)} before the first"
                )
            tensors[tensor.key] = value
        return tensors

    def _as_kept(self, layer: Layer, value: Tensor, like: Tensor) -> Tensor:
        if self.method.is_stateless:
            return layer.view.as_stored(value).to(like.dtype)
        return value


#: The keys of the bases in which the state of a layer is kept beside an adapter.
_OUTPUTS = "%s.outputs"
_INPUTS = "%s.inputs"


class KeptStateOfAdapter(KeptState):
    """The state of a merge of adapters, whose layers it has in bases of the tasks' directions, with
    these bases.
    """

    def shape_in_basis(self, layer: Layer) -> tuple[int, int]:
        num_directions = sum(task.rank_of(layer.param) or 0 for task in self.plan.tasks)
        num_outputs, num_inputs = self._earlier_directions(layer)
        d_o, d_i = layer.view.shape
        d_o = min(d_o, num_directions + num_outputs)
        if "i" in self.method.sides_in_basis:
            d_i = min(d_i, num_directions + num_inputs)
        return d_o, d_i

    def _earlier_directions(self, layer: Layer) -> tuple[int, int]:
        """Return the numbers of the directions of outputs and inputs that the tasks of the merged
        adapter have in a layer.
        """
        plan = self.plan
        if plan.state is not None and _OUTPUTS % layer.name in plan.state.params:
            num_outputs = plan.state.params[_OUTPUTS % layer.name][1]
            num_inputs = plan.state.params.get(_INPUTS % layer.name, (0, num_outputs))[1]
            return num_outputs, num_inputs
        if plan.merged is None:
            return 0, 0
        rank = plan.merged.rank_of(layer.param) or 0
        return rank, rank

    def _tensors_of(self, layer: Layer) -> dict[str, KeptTensor]:
        shape = self.shape_in_basis(layer)
        d_o, d_i = layer.view.shape
        # A list of directions has as many as all tasks can have filled.
        length = min(d_o, d_i, self.plan.last_step * min(shape))
        tensors = {}
        for name, value in self._method_state(layer, shape, torch.float32).items():
            key = f"{layer.name}.{name}"
            like = resize_lists(value, self.method.state_axes.get(name, ""), length)
            tensors[name] = KeptTensor(key, key, like)
        bases = {"outputs": (_OUTPUTS % layer.name, d_o, shape[0])}
        if "i" in self.method.sides_in_basis:
            bases["inputs"] = (_INPUTS % layer.name, d_i, shape[1])
        for name, (key, height, width) in bases.items():
            like = torch.empty((height, width), dtype=torch.float32, device="meta")
            tensors[name] = KeptTensor(key, key, like)
        return tensors

    def is_needed(self, layer: Layer) -> bool:
        settings = self.plan.settings
        is_cut = settings.rank is not None or settings.dtype in ("bfloat16", "float16")
        return not self.method.is_stateless or is_cut

    def means(self) -> dict[str, KeptTensor]:
        return {}

    def read_directions(self, layer: Layer, device: torch.device) -> tuple[LowRank | None, State]:
        """Read those of the merged adapter: for NUFILT, the factors of its update; for methods with
        a state, the bases in which it was kept, filled with zeros to one number of directions.
        """
        plan = self.plan
        if not any(self._earlier_directions(layer)):
            return None, {}
        if plan.state is None or _OUTPUTS % layer.name not in plan.state.keys:
            assert plan.merged is not None
            no_values = torch.empty(0, dtype=torch.float32, device=device)
            update = plan.merged.weight(layer.param, no_values)
            assert isinstance(update, LowRank)
            return update, {}
        state: State = {}
        for name, tensor in self.of_layer(layer).items():
            state[name] = plan.state.source.read(plan.state.keys[tensor.param], device)
        right = state["weight"] if self.method.is_stateless else state["inputs"].mT
        return _of_one_rank(state["outputs"], right), state

    def check(self, name: str) -> list[str]:
        warnings = self._check_layers(name)
        means = [param for param in self.plan.saved_tensors if self._is_rounded_mean(param)]
        return warnings + _warn_of_means(name, means, "float32 from the first merge on")

    def _check_layers(self, name: str) -> list[str]:
        plan = self.plan
        method = self.method
        assert plan.merged is not None
        missing = []
        for layer in plan.layers:
            if plan.merged.rank_of(layer.param):
                for tensor in self.of_layer(layer).values():
                    if plan.state is None or tensor.key not in plan.state.keys:
                        missing.append(tensor.key)
        if not missing:
            return []
        if not method.is_stateless:
            raise ValueError(
                f"the merged adapter '{name}' has no '{missing[0]}' in {STATE_FILE}: "
                f"{method.label} goes on from its own merges of the same layers only; merge its "
                "tasks again, or all at once with the new ones"
            )
        settings = plan.merged_manifest.get("settings", {})
        is_rounded = settings.get("dtype", "auto") not in ("auto", "float32")
        if settings.get("rank") is not None or is_rounded:
            return [f"'{name}' was cut or rounded, and {method.label} goes on from what is left"]
        return []

    def expand(self, layer: Layer, merged: LayerInBasis, weight: Tensor) -> State:
        bases = {"outputs": merged.basis.outputs, "inputs": merged.basis.inputs}
        state = {}
        for name, tensor in self.of_layer(layer).items():
            axes = self.method.state_axes.get(name, "")
            value = bases[name] if name in bases else merged.state[name]
            assert value is not None
            if "k" in axes:
                value = resize_lists(value, axes, tensor.like.shape[axes.index("k")])
            state[name] = value
        return state

    def _as_kept(self, layer: Layer, value: Tensor, like: Tensor) -> Tensor:
        return value


def kept_state(plan: Plan) -> KeptState:
    """Return what the merge of a plan keeps."""
    if plan.is_adapter:
        return KeptStateOfAdapter(plan)
    return KeptState(plan)


def open_kept(
    merged: Checkpoint,
    merged_manifest: Manifest,
    architecture: Architecture,
    method_class: type[LayerMethod],
) -> ModelWeights | None:
    """Open what is kept beside a merged model, or return None if that is nothing from which the
    method goes on.
    """
    if method_class.is_stateless and _has_sums(merged_manifest):
        return None
    # The manifest lists all files, so that the hub is not asked for one that it lacks.
    if merged.revision is not None and STATE_FILE not in merged_manifest.get("files", {}):
        return None
    state = merged.open_inside(STATE_FILE)
    if state is None:
        return None
    return ModelWeights(state, architecture)


def _has_sums(merged_manifest: Manifest) -> bool:
    """Tell whether a merged model is by a method that keeps sums, which NUFILT has no use for."""
    for method in METHODS.values():
        if method.label == merged_manifest.get("method"):
            return not method.is_stateless
    return False


def _warn_of_means(name: str, params: Sequence[str], remedy: str) -> list[str]:
    """Return the warning about means that the merged model of this name has rounded, if any."""
    if not params:
        return []
    return [
        f"'{name}' does not have the means of {format_names(params)} in float32: going on from the "
        f"rounded ones; all tasks at once, or {remedy}, avoid that"
    ]


def _of_one_rank(left: Tensor, right: Tensor) -> LowRank:
    """Return two matrices ``(d_o, m)`` and ``(n, d_i)`` as factors, with zeros where one of them
    has fewer directions.
    """
    rank = max(left.shape[1], len(right))
    left = pad(left, (0, rank - left.shape[1]))
    return LowRank(left, pad(right, (0, 0, 0, rank - len(right))))
