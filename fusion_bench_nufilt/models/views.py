"""How the parameters of a model hold the matrices that are merged.

A layer is a matrix W of shape ``(d_o, d_i)`` whose outputs are ``W x``. A :class:`MatrixView` says
which rows of which parameter hold it, and whether they hold it transposed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class MatrixView:
    """One matrix in a parameter of a model."""

    name: str  # the layer's name: its module's, and the part's where a module holds several
    module: str  # the module's name
    key: str  # the parameter's key in the state dict
    shape: tuple[int, int]  # (d_o, d_i)
    rows: tuple[int, int]  # start and end of the rows in the parameter's first dimension
    part_shape: tuple[int, ...]  # the shape in which these rows are stored
    transposed: bool = False  # whether they are stored as (d_i, d_o)
    linear: bool = True  # whether this is a linear layer and not a convolution

    def matrix(self, part: Tensor) -> Tensor:
        """Return the matrix ``(d_o, d_i)`` in these rows of the parameter, without a copy if they
        are contiguous.
        """
        d_o, d_i = self.shape
        return part.reshape(d_i, d_o).T if self.transposed else part.reshape(d_o, d_i)

    def part(self, matrix: Tensor) -> Tensor:
        """Return a matrix in the form in which the parameter stores it; the inverse of
        :meth:`matrix`.
        """
        return (matrix.T if self.transposed else matrix).reshape(self.part_shape)

    def read(self, model: nn.Module) -> Tensor:
        """Return the matrix in a model, which shares the model's memory if the parameter is
        contiguous.
        """
        return self.matrix(self._rows(model.get_parameter(self.key)))

    def write(self, model: nn.Module, matrix: Tensor) -> None:
        """Write a matrix into a model."""
        self._rows(model.get_parameter(self.key)).copy_(self.part(matrix))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the rows of one parameter into another of the same shape."""
        self._rows(target).copy_(self._rows(source))

    def _rows(self, parameter: Tensor) -> Tensor:
        return parameter.detach()[slice(*self.rows)]


def views(model: nn.Module) -> list[MatrixView]:
    """Return all matrices of a model in the order of its modules (``docs/checkpoints.md`` has a
    table).
    """
    return [view for name, module in model.named_modules() for view in _views_of(name, module)]


def unsupported_modules(model: nn.Module) -> dict[str, str]:
    """Return the names of modules whose weights no view can hold, and why."""
    found = {}
    for name, module in model.named_modules():
        known = {view.key for view in _views_of(name, module)}
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        grouped = isinstance(module, _ConvNd) and module.groups > 1
        for attribute, tensor in own:
            what = f"'{join(name, attribute)}' of shape {tuple(tensor.shape)}"
            if "weight" in attribute and tensor.dtype not in FLOATS:
                found[name] = (
                    f"{what} is stored as {tensor.dtype}: quantised weights can't be merged"
                )
            elif grouped and attribute == "weight":
                found[name] = (
                    f"{what} is a convolution in {module.groups} groups, which is no matrix"
                )
            elif (
                join(name, attribute) not in known
                and isinstance(tensor, nn.Parameter)
                and _long_sides(tensor) > 2
            ):
                found[name] = (
                    f"{what} of {type(module).__name__} is no matrix or stack of matrices that is "
                    "known"
                )
    return found


def looks_like_matrix(module: nn.Module, attribute: str, parameter: Tensor) -> bool:
    """Tell whether a parameter has the shape of a matrix or of several, and is neither an embedding
    nor a bias.
    """
    table = isinstance(module, nn.Embedding | nn.EmbeddingBag) or attribute.endswith("bias")
    return _long_sides(parameter) >= 2 and not table


def join(name: str, attribute: str) -> str:
    """Return the dotted name of a module's attribute; both may be empty, as the root module's name
    is.
    """
    return ".".join(filter(None, (name, attribute)))


def _long_sides(tensor: Tensor) -> int:
    return sum(size > 1 for size in tensor.shape)


def _views_of(name: str, module: nn.Module) -> Iterator[MatrixView]:
    own = {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.numel()
    }

    def one(
        attribute: str, part: str = "", *, transposed: bool = False, linear: bool = True
    ) -> Iterator[MatrixView]:
        parameter = own.get(attribute)
        if parameter is not None and parameter.dtype in FLOATS and parameter.ndim >= 2:
            yield from several(attribute, [part], transposed=transposed, linear=linear)

    def several(
        attribute: str, parts: Sequence[str], *, transposed: bool = False, linear: bool = True
    ) -> Iterator[MatrixView]:
        parameter = own[attribute]
        size = len(parameter) // len(parts)
        stored = (size, *parameter.shape[1:])
        height, *sides = stored[1:] if size == 1 and parameter.ndim == 3 and linear else stored
        width = math.prod(sides)
        shape = (width, height) if transposed else (height, width)
        for i, part in enumerate(parts):
            rows = (i * size, (i + 1) * size)
            yield MatrixView(
                join(name, part),
                name,
                join(name, attribute),
                shape,
                rows,
                stored,
                transposed,
                linear,
            )

    if isinstance(module, nn.Linear):
        yield from one("weight")
    elif _is_conv1d(module):
        yield from one("weight", transposed=True)
    elif isinstance(module, _ConvNd):
        if module.groups == 1 and not module.transposed:
            yield from one("weight", linear=False)
    elif (
        "in_proj_weight" in own
        and own["in_proj_weight"].ndim == 2
        and len(own["in_proj_weight"]) % 3 == 0
    ):
        yield from several("in_proj_weight", ["in_proj.q", "in_proj.k", "in_proj.v"])
    elif isinstance(module, nn.MultiheadAttention):  # keys or values differ in size from queries
        for part in ("q_proj", "k_proj", "v_proj"):
            yield from one(f"{part}_weight", part)
    elif (transposed := _orientation(own)) is not None:
        for attribute in ("gate_up_proj", "down_proj"):
            experts = [f"{expert}.{attribute}" for expert in range(len(own[attribute]))]
            yield from several(attribute, experts, transposed=transposed)
    elif "weight" in own and own["weight"].ndim == 3:
        sizes = getattr(module, "output_size", None), getattr(module, "input_size", None)
        if own["weight"].shape[1:] == sizes:
            yield from several("weight", list(map(str, range(len(own["weight"])))))


def _is_conv1d(module: nn.Module) -> bool:
    """Tell, without importing transformers, whether a module is its Conv1D: a linear layer stored
    transposed.
    """
    return any(
        (c.__module__, c.__name__) == ("transformers.pytorch_utils", "Conv1D")
        for c in type(module).__mro__
    )


def _orientation(own: dict[str, nn.Parameter]) -> bool | None:
    """Tell whether fused experts are stored transposed, or return None if these are not fused
    experts.

    With n inputs and m hidden units, ``gate_up_proj`` and ``down_proj`` of an expert are (2m, n)
    and (n, m), or (n, 2m) and (m, n) if transposed. For no n and m are the two cases the same.
    """
    gate_up, down = own.get("gate_up_proj"), own.get("down_proj")
    if (
        gate_up is None
        or down is None
        or gate_up.ndim != 3
        or down.ndim != 3
        or len(gate_up) != len(down)
    ):
        return None
    (_, *up), (_, *back) = gate_up.shape, down.shape
    if up == [2 * back[1], back[0]]:
        return False
    return True if up == [back[1], 2 * back[0]] else None
