"""Adapters on fused experts (peft's ``target_parameters``), whose factors hold those of all experts
of a parameter.

For a parameter ``(experts, height, width)`` of the loaded model, A is ``(experts * rank, a)``,
expert by expert, and B is ``(b, experts * rank)``, rank by rank. An expert's update is B A or its
transpose, by the versions of peft (0.17 and 0.18, 0.19.0, later ones) and of transformers. The
sides tell which; where they are equal, other experts of the model do, or the ``peft_version`` of
the adapter. All experts of a model are alike in this.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .architecture import Architecture, PlaceInStack
from .checkpoint import Checkpoint
from .entries import Entry
from .lora import Factors, Pair
from .peft_layers import PeftLayer, outer_module

_WITH_ITS_PEFT = "merge it into its base with what trained it, and give that folder"


@dataclass(frozen=True)
class Expert:
    """Where the factors of a fused parameter hold those of a layer."""

    number: int
    count: int  # of experts
    rows: slice  # of the expert's update that are the layer's
    transposed: bool  # whether the expert's update is (B A)^T
    flipped: bool  # whether the layer's matrix is the transpose of these rows

    def cut(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors A ``(rank, d_i)`` and B ``(d_o, rank)`` of the layer's update, without
        its scaling.
        """
        right = a.unflatten(0, (self.count, -1))[self.number]
        left = b.unflatten(1, (-1, self.count)).select(2, self.number)
        if self.transposed:
            left, right = right.T, left.T
        left = left[self.rows]
        if self.flipped:
            return left.T, right.T
        return right, left


@dataclass(frozen=True, eq=False)
class FactorsOfExpert(Factors):
    """The factors of an update of a layer, in those of a fused parameter."""

    expert: Expert

    def pair(self, device: torch.device) -> Pair:
        a, b = super().pair(device)
        return self.expert.cut(a, b)


@dataclass(frozen=True, eq=False)
class ExpertRows(Entry):
    """The tensor of a layer in a fused parameter that was saved whole, as the loaded model has
    it.
    """

    start: int  # of the elements that are the layer's, in the flattened parameter
    stop: int
    width: int  # of the parameter's rows
    is_transposed: bool  # whether the layer's tensor is the transpose of these rows

    @property
    def unit(self) -> int:
        return self.stop - self.start

    def read(self, theta_0: Tensor) -> Tensor:
        rows = self.source.elements(self.key, self.start, self.stop).reshape(-1, self.width)
        if self.is_transposed:
            rows = rows.T
        value = rows.reshape(self.shape)
        self.source.check_finite(self.key, value)
        return value.to(theta_0.device)

    def elements(self, start: int, stop: int, theta_0: Tensor) -> Tensor:
        return self.read(theta_0).flatten()[start:stop]


def find_saved_experts(
    adapter: Checkpoint, architecture: Architecture, key: str, name: str
) -> dict[str, ExpertRows]:
    """Return by param where an adapter's full tensor of a fused parameter holds layers.

    There are none if the parameter, by its ``name`` in the adapter, holds no layers.
    """
    module, _, parameter = name.rpartition(".")
    stack = architecture.stacks_of(module).get(parameter)
    if stack is None or not architecture.holds_layers(stack):
        return {}
    count, height, width = architecture.stacks[stack]
    shape = adapter.tensors[key].shape
    if shape != (count, height, width):
        raise ValueError(
            f"adapter '{adapter.name}', tensor '{key}': shape {shape} differs from "
            f"{(count, height, width)} of the base: it is for another base"
        )
    places = {}
    for param, number, rows, flipped in _places(architecture, stack, adapter):
        view = architecture.views[param]
        first = number * height + rows.start
        last = number * height + rows.stop
        transposed = flipped != view.transposed
        places[param] = ExpertRows(
            adapter, key, view.stored_shape, first * width, last * width, width, transposed
        )
    return places


def find_experts(
    adapter: Checkpoint,
    architecture: Architecture,
    keys: Mapping[str, Mapping[str, str]],
    layers: Mapping[str, PeftLayer],
) -> dict[str, dict[str, Expert]]:
    """Return the experts by param, by the module that has their factors.

    Args:
        adapter: has the factors.
        architecture: that of its base.
        keys: those of its factors by part, by module.
        layers: what peft says of these.

    Raises:
        ValueError: nothing tells how the factors are to be read.
    """
    names = {}  # of the stacks, by module
    transposed = {}  # whether the transpose of B A is added, where sides tell, by module
    for module, parts in keys.items():
        stacks = architecture.stacks_of(outer_module(module))
        if not stacks:
            continue
        names[module] = stacks[layers[module].parameter]
        d_i = adapter.tensors[parts["A"]].shape[1]
        d_o = adapter.tensors[parts["B"]].shape[0]
        if d_i != d_o:
            transposed[module] = architecture.stacks[names[module]][1:] != (d_o, d_i)
    experts: dict[str, dict[str, Expert]] = {}
    for module, name in names.items():
        count, *sides = architecture.stacks[name]
        # Square experts tell no order, and have that of the others: all were written by one peft.
        orders = set(transposed.values())
        if module in transposed:
            orders = {transposed[module]}
        if not orders:
            orders = _orders_by_version(adapter, architecture, name)
        if len(orders) != 1:
            raise ValueError(
                f"adapter '{adapter.name}' changes the square experts of '{name}', {sides}, and "
                "nothing tells by which version of peft: whether B A or its transpose is added "
                f"depends on it: {_WITH_ITS_PEFT}"
            )
        is_transposed = orders == {True}
        _check_order(adapter, count, layers[module].rank)
        experts[module] = {}
        for param, number, rows, flipped in _places(architecture, name, adapter):
            experts[module][param] = Expert(number, count, rows, is_transposed, flipped)
    return experts


def _orders_by_version(adapter: Checkpoint, architecture: Architecture, name: str) -> set[bool]:
    """Return whether the transpose of B A is added to square experts, or nothing if the adapter
    does not tell which peft wrote it.
    """
    config: Mapping[str, Any] = adapter.adapter_config
    written_by = re.match(r"(\d+)\.(\d+)\.(\d+)", str(config.get("peft_version")))
    if written_by is None:
        return set()
    version = tuple(map(int, written_by.groups()))
    if version < (0, 19, 0):
        return {True}
    if version == (0, 19, 0):
        return set()
    return {name in architecture.transposed_stacks}


def _check_order(adapter: Checkpoint, count: int, rank: int) -> None:
    """Refuse an adapter of unsloth that does not say that B's columns are rank by rank: until 17
    September 2026, they were expert by expert. For one expert or rank 1, the two orders are the
    same.
    """
    config: Mapping[str, Any] = adapter.adapter_config
    layout = config.get("lora_B_layout")
    is_marked = (config.get("auto_mapping") or {}).get("unsloth_fixed")
    base = str(config.get("base_model_name_or_path"))
    is_of_unsloth = layout is not None or is_marked or base.startswith("unsloth/")
    if is_of_unsloth and layout != "rank_major" and min(count, rank) > 1:
        raise ValueError(
            f"adapter '{adapter.name}' has lora_B_layout {layout}, and only rank_major can be read "
            "(if unsloth trained it since 17 September 2026, set that in adapter_config.json): "
            f"{_WITH_ITS_PEFT}"
        )


def _places(architecture: Architecture, name: str, adapter: Checkpoint) -> list[PlaceInStack]:
    """Return the places of the layers in a stack that an adapter changes."""
    places = architecture.places_in_stack(name)
    if not places:
        raise ValueError(
            f"adapter '{adapter.name}' changes '{name}', which is no stack of layers: "
            f"{_WITH_ITS_PEFT}"
        )
    return places
