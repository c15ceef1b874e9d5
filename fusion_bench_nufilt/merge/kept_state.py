"""What a merge keeps beside its model for the next one, in float32 at least: what the method keeps
of each layer (for NUFILT, the layer itself), and the running means of tensors outside the layers,
where the model rounds them.

:class:`KeptState` alone decides which shapes and dtypes these tensors have. It reads those of an
earlier merge, and makes those of this one. Beside a model, a layer's are in its own outputs and
inputs; beside an adapter, in bases of the tasks' directions, which are kept with them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusion_bench_nufilt.methods.base import State
from fusion_bench_nufilt.models.layers import Layer
from fusion_bench_nufilt.models.source import format_names
from fusion_bench_nufilt.utils.manifest import STATE_FILE, state_key
from fusion_bench_nufilt.utils.tensors import describe

from .basis import LayerInBasis, along_axes, resize_lists
from .engine import LayerInProgress
from .plan import Plan, is_rounded

# The parts of a layer's state that are the bases in which the others are, beside an adapter.
_OUTPUTS = "outputs"
_INPUTS = "inputs"


class KeptState:
    """The state of a merge, before its first task and after its last."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.method = plan.method
        self._states_by_shapes: dict[tuple[Any, ...], State] = {}

    # Which tensors it has

    def of_layer(self, layer: Layer) -> State:
        """Return the tensors of a layer's state, by their names: their shapes and dtypes without
        values, on the meta device, where they take no memory.
        """
        shape = layer.view.shape
        if self.plan.is_adapter:
            shape = self.shape_in_basis(layer) or shape
        dtype = self.plan.dtype(layer.keys[0])
        # Once for all layers alike, of which a mixture of experts has thousands.
        shapes = (layer.view.shape, shape, dtype)
        if shapes not in self._states_by_shapes:
            base = torch.empty(shape, dtype=dtype, device="meta")
            self._states_by_shapes[shapes] = self._state_of(layer, base)
        return self._states_by_shapes[shapes]

    def _state_of(self, layer: Layer, base: Tensor) -> State:
        """Return the state of a layer, given what it is merged into."""
        d_o, d_i = layer.view.shape
        likes = self.method.state_of(layer.name, base)
        if not self.plan.is_adapter:
            return likes
        shape = base.shape
        # A list of directions has as many as all tasks can have filled.
        length = min(d_o, d_i, self.plan.last_step * min(shape))
        for name, like in likes.items():
            likes[name] = resize_lists(like, self._axes(name), length)
        likes[_OUTPUTS] = base.new_empty((d_o, shape[0]))
        if "i" in self.method.sides_in_basis:
            likes[_INPUTS] = base.new_empty((d_i, shape[1]))
        return likes

    def _axes(self, name: str) -> str:
        """Return what the axes of a tensor of the method's state are."""
        return self.method.state_axes.get(name, "")

    def is_needed(self, layer: Layer) -> bool:
        """Tell whether a layer has a state that the result's weight does not tell by itself."""
        is_cut = self.plan.settings.rank is not None
        return self.method.keeps_sums or is_cut or self.plan.rounds(layer.keys[0])

    def means(self) -> State:
        """Return the running means that the model alone would round, by param, without values."""
        plan = self.plan
        means: State = {}
        if plan.targets.other_params != "mean" or plan.is_adapter:
            return means
        for param, keys in plan.other_keys.items():
            if param in plan.averaged and plan.rounds(keys[0]):
                dtype = torch.promote_types(plan.dtype(keys[0]), torch.float32)
                shape = plan.pretrained.entries[param].shape
                means[param] = torch.empty(shape, dtype=dtype, device="meta")
        return means

    def needed(self) -> State:
        """Return all that is kept beside the result, by key, in the order of the file: beside a
        model in memory, running means in any case.
        """
        tensors: State = {}
        if self.plan.keeps_state:
            for layer in filter(self.is_needed, self.plan.layers):
                for name, like in self.of_layer(layer).items():
                    tensors[state_key(layer.name, name)] = like
        if self.plan.keeps_state or self.plan.base.in_memory:
            for param, like in self.means().items():
                tensors[state_key(param)] = like
        return tensors

    def keys(self) -> set[str]:
        """Return the keys of all that a merge may go on from."""
        keys = {state_key(param) for param in self.plan.other_keys}
        for layer in self.plan.layers:
            keys.update(state_key(layer.name, name) for name in self.of_layer(layer))
        return keys

    def shape_in_basis(self, layer: Layer) -> tuple[int, int] | None:
        """Return the shape of a layer in the basis of its tasks' factors, in which it is merged, or
        None for one that is merged as it is.
        """
        sides = self.method.sides_in_basis
        earlier = self._earlier_directions(layer)
        ranks = [task.entries[layer.param].rank for task in self.plan.tasks]
        if "o" not in sides or earlier is None:
            return None
        num_outputs, num_inputs = earlier
        for rank in ranks:
            if rank is None:
                return None
            num_outputs += rank
            num_inputs += rank
        d_o, d_i = layer.view.shape
        # With as many directions as the layer, a basis saves nothing.
        if not self.plan.is_adapter and not 0 < num_outputs < min(d_o, d_i):
            return None
        return min(d_o, num_outputs), min(d_i, num_inputs) if "i" in sides else d_i

    def _earlier_directions(self, layer: Layer) -> tuple[int, int] | None:
        """Return the numbers of the directions of outputs and inputs that the tasks of the merged
        model have in a layer, or None if it has the layer in full.
        """
        plan = self.plan
        if plan.merged is None:
            return 0, 0
        rank = plan.merged.entries[layer.param].rank
        if rank is None:
            return None
        if plan.state is None or not self.has_state(layer):
            return rank, rank
        _, num_outputs = plan.state.entries[state_key(layer.name, _OUTPUTS)].shape
        num_inputs = num_outputs
        inputs = plan.state.entries.get(state_key(layer.name, _INPUTS))
        if inputs is not None:
            _, num_inputs = inputs.shape
        return num_outputs, num_inputs

    # What an earlier merge kept

    def has_state(self, layer: Layer) -> bool:
        """Tell whether an earlier merge kept a state of a layer."""
        if self.plan.state is None:
            return False
        names = [*self.method.state_names]
        if self.plan.is_adapter:
            names.append(_OUTPUTS)
        return all(state_key(layer.name, name) in self.plan.state.entries for name in names)

    def read(self, layer: Layer, device: torch.device) -> State:
        """Read the state of a layer that an earlier merge kept, which is empty if it kept none."""
        earlier = self.plan.state
        if earlier is None or not self.has_state(layer):
            return {}
        state: State = {}
        for name, like in self.of_layer(layer).items():
            key = earlier.entries[state_key(layer.name, name)].key
            value = earlier.source.read(key, device)
            # A method may write to it, and what lies in memory is the caller's.
            state[name] = value.to(like.dtype, copy=earlier.source.in_memory)
        return state

    def read_in_basis(self, layer: Layer, device: torch.device) -> State:
        """Read the state of a layer that the merged adapter changes, with the bases in which it is:
        for NUFILT, the factors of its update, where nothing else was kept.
        """
        state = self.read(layer, device)
        if state or self.plan.merged is None or not self.plan.merged.entries[layer.param].rank:
            return state
        update = self.plan.merged.factors(layer.param, device)
        return {_OUTPUTS: update.left, "weight": update.right}

    def turn(self, layer: Layer, state: State, likes: State, bases: Mapping[str, Tensor]) -> State:
        """Return a state that was kept in other bases, given these in the new ones, by side.

        ``likes`` is the state before the first task in the new ones.
        """
        turned = {}
        for name, like in likes.items():
            value = resize_lists(state[name], self._axes(name), min(layer.view.shape))
            turned[name] = along_axes(value, self._axes(name), bases).to(like.dtype)
        return turned

    def check(self, name: str) -> list[str]:
        """Check that the method can go on from what is kept beside the merged model of this name,
        and return warnings.
        """
        plan = self.plan
        label = self.method.label  # a variant has its method's
        made_by = plan.merged_manifest.get("method", label)
        if made_by != label and self.method.keeps_sums:
            raise ValueError(
                f"'{name}' was merged by {made_by}, which keeps no sums that {label} goes on from: "
                f"merge all of its tasks again with {self.method.name}, or go on with its own "
                "method"
            )
        stored = set(plan.state.entries) if plan.state else set()
        missing: list[str] = []
        for layer in plan.layers:
            if plan.merged is not None and plan.merged.entries[layer.param].rank == 0:
                continue  # a merged adapter has nothing of it
            for part, like in self.of_layer(layer).items():
                key = state_key(layer.name, part)
                if key not in stored:
                    # A weight that the model has in float32 needs no second copy beside it.
                    if self.method.keeps_sums or self._is_rounded(layer.param):
                        missing.append(key)
                elif not plan.is_adapter:  # of whose bases earlier tasks have a part
                    self._check_like(key, like, tuple(like.shape))
        rounded_means = []
        for param, like in self.means().items():
            if state_key(param) in stored:
                self._check_like(state_key(param), like, self._shape_before(param))
            elif self._is_rounded_mean(param):
                rounded_means.append(param)
        rounded_means += [param for param in plan.saved_tensors if self._is_rounded_mean(param)]
        unknown = sorted(stored - self.keys())
        if self.method.keeps_sums and (missing or unknown):
            # Sums of other layers, or of another method, are not those of these tasks.
            content = f"no '{missing[0]}'" if missing else f"'{unknown[0]}'"
            raise ValueError(
                f"'{name}' has {content} in {STATE_FILE}: {label} goes on from its own "
                "merges of the same layers only, without --no-state; merge its tasks again, or "
                "all at once with the new ones"
            )
        warnings = []
        if missing and plan.merged_manifest and (plan.keeps_state or self._was_cut()):
            warnings.append(
                f"'{name}' does not have all merged layers in float32: going on from the rounded "
                "or cut ones"
            )
        if rounded_means:
            warnings.append(
                f"'{name}' does not have the means of {format_names(rounded_means)} in float32: "
                "going on from the rounded ones; all tasks at once, or float32 from the first "
                "merge on, avoid that"
            )
        return warnings

    def _shape_before(self, param: str) -> tuple[int, ...]:
        """Return the shape that a tensor has in the merged model, or else in the base."""
        merged = self.plan.merged
        info = None if merged is None else merged.info(param)
        info = info or self.plan.pretrained.info(param)
        assert info is not None
        return info.shape

    def _check_like(self, key: str, like: Tensor, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that was kept in another shape or dtype than the plan needs."""
        earlier = self.plan.state
        assert earlier is not None
        stored = earlier.info(key)
        assert stored is not None
        dtype = describe(like).dtype
        if stored.shape != shape or stored.dtype != dtype:
            raise ValueError(
                f"'{earlier.source.name}', tensor '{key}': {stored.dtype} {stored.shape} is not "
                f"{dtype} {shape}, as the base's layer would be; remove that folder if the "
                "weights beside it are right"
            )

    def _was_cut(self) -> bool:
        """Tell whether the merged model has updates in a smaller rank than they had."""
        return self.plan.merged_manifest.get("settings", {}).get("rank") is not None

    def _is_rounded(self, param: str) -> bool:
        """Tell whether the merged model has a tensor cut, or in fewer digits than float32."""
        merged = self.plan.merged
        if merged is None:
            return self.plan.rounds(self.plan.pretrained.entries[param].key)
        info = merged.info(param)
        if info is not None:
            return is_rounded(info)
        dtype = self.plan.merged_manifest.get("settings", {}).get("dtype")
        return self._was_cut() or dtype in ("bfloat16", "float16")

    def _is_rounded_mean(self, param: str) -> bool:
        """Tell whether the merged model has the mean of a tensor in fewer digits than float32."""
        merged = self.plan.merged
        # A mean without a model in it is replaced by the first one, so that its digits don't count.
        if self.plan.models_in_mean(param) == 0:
            return False
        if merged is not None and merged.entries[param].rank == 0:
            return False  # it has the base's
        return self._is_rounded(param)

    # What this merge keeps

    def by_key(
        self, layer: Layer, merged: LayerInProgress, weight: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the state of a layer by its keys in the file, which has a place for these shapes
        and dtypes alone; nothing where none is kept.

        ``weight`` is that of a layer that was merged in a basis, as the base has it.
        """
        if not (self.plan.keeps_state and self.is_needed(layer)):
            return {}
        state = merged.state
        if isinstance(merged, LayerInBasis):
            state = self._from_basis(layer, merged, weight)
        tensors = {}
        for name, like in self.of_layer(layer).items():
            value = state[name]
            # The header of the file is made from the state that a method starts with.
            if value.shape != like.shape or value.dtype != like.dtype:
                raise ValueError(
                    f"method {self.method.name}, layer '{layer.name}': '{name}' of its state is "
                    f"{value.dtype} {tuple(value.shape)} after the last task and was "
                    f"{like.dtype} {tuple(like.shape)} before the first"
                )
            tensors[state_key(layer.name, name)] = value
        return tensors

    def _from_basis(self, layer: Layer, merged: LayerInBasis, weight: Tensor | None) -> State:
        """Return the state of a layer that was merged in a basis as it is kept."""
        likes = self.of_layer(layer)
        if self.plan.is_adapter:
            state = {**merged.state, _OUTPUTS: merged.basis.outputs}
            if merged.basis.inputs is not None:
                state[_INPUTS] = merged.basis.inputs
            for name in merged.state:
                axes = self._axes(name)
                if "k" in axes:
                    length = likes[name].shape[axes.index("k")]
                    state[name] = resize_lists(state[name], axes, length)
            return state
        if not self.method.keeps_sums:
            assert weight is not None
            return {"weight": layer.view.matrix(weight)}
        state = {}
        for name, like in likes.items():
            value = merged.basis.expand(merged.state[name], self._axes(name))
            state[name] = value.to(like.dtype)
        return state
