"""The interface of layer-wise merging methods, all of which `fusion_bench` and `nufilt merge` run
in the same way.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from .task_vector import TaskVector

# Lazy, so that the outermost number is the block's: experts inside it have numbers, too.
_BLOCK = re.compile(r"(.*?\.)??(\d+)\.(.+)")

State = dict[str, Tensor]
"""What a method keeps of n layers between two tasks: tensors ``(n, ...)`` by name."""

Measures = dict[str, Tensor]
"""What a step measured of n layers: tensors ``(n,)`` by name."""


class LayerMethod(ABC):
    """A method that merges every layer by itself, one task after another.

    A subclass says what it keeps of layers (:meth:`init_state`), how a task changes that
    (:meth:`update`), and which weights follow from it (:meth:`merged_weight`). A merge of many
    tasks calls ``update`` for each of them and ``merged_weight`` once, but for a method that keeps
    the merged weight and nothing else, which needs no ``merged_weight``. All three are functions of
    stacks: of n layers of one shape, whose weights are ``(n, d_o, d_i)``; what becomes of a layer
    does not depend on the others. All compute in the dtype of what they are given, float32 at
    least, or float64 where a solver failed in less.

    The constructor takes an instance of :attr:`Options`, the names of all merged layers in the
    order of the model, the seed of all random draws, the number of the last block of each stack of
    blocks that the model has (by default, that the layers have), and the layers' shapes, which
    those of the stacks are unless :attr:`sides_in_basis` lets them be given in a basis. The names
    of the layers in a stack are :attr:`names`.
    """

    name: ClassVar[str]
    """The name on the command line and in YAML files."""
    label: ClassVar[str]
    """The name in titles and tables."""
    citation: str
    """What the method is and where it was published, in Markdown, for model cards."""
    Options: ClassVar[type]
    """A frozen dataclass whose fields are made by :func:`fusion_bench_nufilt.utils.options.option`.
    """
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of this method that differ from those of :attr:`Options` and of
    :class:`fusion_bench_nufilt.methods.options.TargetConfig`."""
    itemsize: ClassVar[int] = 4
    """Bytes per element in its computations: 4 for float32, 8 for float64."""
    solves_together: ClassVar[bool] = False
    """Whether an accelerator solves layers of one shape faster together."""
    weighs_tasks: ClassVar[bool] = False
    """Whether the result depends on the ``strength`` of whole tasks."""
    sides_in_basis: ClassVar[str] = ""
    """The sides of a layer, "o" for its outputs and "i" for its inputs, of which any orthonormal
    basis gives the same update: for a matrix Q of orthonormal columns, tasks Q tau have the update
    Q X. With "o", a merge of adapters gives the method their factors in a basis of as many outputs
    as they have directions, on a base of zeros."""
    state_axes: ClassVar[Mapping[str, str]] = {}
    """What the axes of each tensor in a layer's state are, where ``sides_in_basis`` says that it
    may be given in a basis: "o" for the layer's outputs, "i" for its inputs, and "k" for a list of
    ``min(d_o, d_i)`` at most, with zeros behind."""
    logged: ClassVar[tuple[str, ...]] = ("task_norm",)
    """Entries of the reports whose means over the layers go to a run's loggers."""

    def __init__(
        self,
        options: Any,
        layers: Sequence[str],
        seed: int = 42,
        last_blocks: Mapping[str | None, int] | None = None,
        shapes: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.options = options
        self.layers = layers
        self.seed = seed
        self.last_blocks = last_blocks or last_block_numbers(layers)
        self.shapes = shapes or {}
        self.names = layers
        """The layers of the stack that is merged, see :meth:`for_stack`."""

    def for_stack(self, names: Sequence[str]) -> Self:
        """Return the method for a stack of these of its layers."""
        method = copy(self)
        method.names = names
        return method

    def __str__(self) -> str:
        """The method's name and all its settings."""
        settings = [f"{key} {value}" for key, value in vars(self.options).items()]
        return f"{self.label} ({', '.join(settings)})"

    def layer_shape(self, base: Tensor) -> tuple[int, int]:
        """Return the shape ``(d_o, d_i)`` of the layers of the stack, whose pretrained weights may
        be given in a basis.
        """
        d_o, d_i = base.shape[-2:]
        return self.shapes.get(self.names[0], (d_o, d_i))

    @cached_property
    def state_names(self) -> tuple[str, ...]:
        """The names of what the method keeps of a layer."""
        base = torch.empty((2, 2), dtype=torch.float32, device="meta")
        return tuple(self.state_of("layer", base))

    @property
    def keeps_sums(self) -> bool:
        """Whether it keeps more than the merged weight, ``{"weight": W}``, which the model has."""
        return self.state_names != ("weight",)

    @abstractmethod
    def init_state(self, base: Tensor) -> State:
        """Return the states of layers before the first task, given their pretrained weights; on the
        meta device, too, which tells their names and shapes.
        """

    def state_of(self, name: str, base: Tensor) -> State:
        """Return the state of one layer before the first task, given its pretrained weight."""
        stack = self.for_stack([name]).init_state(base[None])
        return {key: value[0] for key, value in stack.items()}

    @abstractmethod
    def update(
        self, state: State, base: Tensor, task: TaskVector, step: int
    ) -> tuple[State, Measures]:
        """Return the states after one more task, and what the step measured.

        Args:
            state: the layers' states, whose shapes and dtypes the new ones have, and whose tensors
                may be written to, but the merged weight, which may be the pretrained one.
            base: their pretrained weights.
            task: what the task changes in them.
            step: the number of the task in the stream, from 1.
        """

    def merged_weight(self, state: State, base: Tensor) -> Tensor:
        """Return the merged weights that follow from states, in the dtype of the pretrained ones;
        by default the ``weight`` that is kept.
        """
        return state["weight"].to(base.dtype)

    def warning(self, shapes: Sequence[tuple[int, int]], *, all_merged: bool = False) -> str | None:
        """Return a warning if the options are doubtful for layers of these shapes ``(d_o, d_i)``,
        with other ones.

        ``all_merged`` says that these are all linear layers in the model's blocks.
        """
        return None

    def working_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Return the most bytes that a layer takes on a CPU while it is merged, beside its weights
        and its state.

        ``itemsize`` is that of the weights' values as they are computed with: 4 or 8.
        """
        widest = max(itemsize, self.itemsize)
        return widest * (5 * math.prod(shape) + 10 * min(shape) ** 2)


def check_update(method: LayerMethod, state: State, result: Any) -> tuple[State, Measures]:
    """Return what :meth:`LayerMethod.update` returned for a state; a ValueError says why it can't
    be that.
    """
    call = f"method '{method.name}': update()"
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ValueError(f"{call} must return two values, the state and what was measured")
    after, measures = result
    if _shapes(after) != _shapes(state):
        raise ValueError(f"{call} was given the state {_shapes(state)}, returned {_shapes(after)}")
    count = len(method.names)
    if any(shape != (count,) for shape in _shapes(measures).values()):
        raise ValueError(
            f"{call} must measure one number for each of {count} layers, returned "
            f"{_shapes(measures)}"
        )
    return after, measures


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(torch.as_tensor(value).shape) for name, value in tensors.items()}


def block_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes of what is computed of some rows of a layer at a time: the values of a task
    and of the base, widened, and what becomes of them (:func:`.row_blocks`).
    """
    return 3 * itemsize * min(math.prod(shape), 2**17)


class Block(NamedTuple):
    """The outermost numbered block around a layer."""

    # The name of what holds the blocks, with a dot, which tells stacks apart; None at the top.
    stack: str | None
    number: int
    inside: str  # the rest of the layer's name


def block_of(name: str) -> Block | None:
    """Return the block of a layer, or None for a layer outside all blocks."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        return None
    return Block(match[1], int(match[2]), match[3])


def last_block_numbers(names: Iterable[str]) -> dict[str | None, int]:
    """Return the number of the last block of each stack that holds one of these layers or
    tensors.
    """
    last: dict[str | None, int] = {}
    for name in names:
        block = block_of(name)
        if block is not None:
            last[block.stack] = max(last.get(block.stack, 0), block.number)
    return last
