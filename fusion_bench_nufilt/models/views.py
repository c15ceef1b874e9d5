"""How the parameters of a model hold the matrices that are merged.

A layer is a matrix W of shape ``(d_o, d_i)`` whose outputs are ``W x``. A :class:`MatrixView` says
which rows of which parameter hold it, and whether they hold it transposed.
"""

import math
from collections.abc import Mapping, Sequence
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
        if self.transposed:
            return part.reshape(d_i, d_o).T
        return part.reshape(d_o, d_i)

    def part(self, matrix: Tensor) -> Tensor:
        """Return a matrix in the form in which the parameter stores it; the inverse of
        :meth:`matrix`.
        """
        stored = matrix.T if self.transposed else matrix
        return stored.reshape(self.part_shape)

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
    all_views: list[MatrixView] = []
    for name, module in model.named_modules():
        all_views += _views_of(name, module)
    return all_views


def unsupported_modules(model: nn.Module) -> dict[str, str]:
    """Return the names of modules whose weights no view can hold, and why."""
    reasons = {}
    for name, module in model.named_modules():
        keys_of_views = {view.key for view in _views_of(name, module)}
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for attribute, tensor in tensors:
            key = join(name, attribute)
            label = f"'{key}' of shape {tuple(tensor.shape)}"
            is_weight = attribute == "weight"
            is_parameter = isinstance(tensor, nn.Parameter)
            if "weight" in attribute and tensor.dtype not in FLOATS:
                reasons[name] = (
                    f"{label} is stored as {tensor.dtype}: quantised weights can't be merged"
                )
            elif is_weight and isinstance(module, _ConvNd) and module.groups > 1:
                reasons[name] = (
                    f"{label} is a convolution in {module.groups} groups, which is no matrix"
                )
            elif key not in keys_of_views and is_parameter and _long_sides(tensor) > 2:
                reasons[name] = (
                    f"{label} of {type(module).__name__} is no matrix or stack of matrices that "
                    "is known"
                )
    return reasons


def looks_like_matrix(module: nn.Module, attribute: str, parameter: Tensor) -> bool:
    """Tell whether a parameter has the shape of a matrix or of several, and is neither an embedding
    nor a bias.
    """
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or attribute.endswith("bias"):
        return False
    return _long_sides(parameter) >= 2


def join(name: str, attribute: str) -> str:
    """Return the dotted name of a module's attribute; both may be empty, as the root module's name
    is.
    """
    return ".".join(filter(None, (name, attribute)))


def _long_sides(tensor: Tensor) -> int:
    # A class token is (1, 1, d), and no stack of matrices.
    return sum(size > 1 for size in tensor.shape)


def _views_of(name: str, module: nn.Module) -> list[MatrixView]:
    """Return the matrices in a module's own parameters."""
    own = {}
    for attribute, parameter in module.named_parameters(recurse=False):
        # One without elements holds no matrix, and has no rows to divide its size by.
        if parameter.numel():
            own[attribute] = parameter
    if isinstance(module, nn.Linear):
        return _whole(name, own, "weight")
    if _is_conv1d(module):
        return _whole(name, own, "weight", transposed=True)
    if isinstance(module, _ConvNd):
        # An output of a group sees the inputs of its group alone, and a transposed convolution
        # stores its inputs first: neither is (d_o, d_i).
        if module.groups > 1 or module.transposed:
            return []
        return _whole(name, own, "weight", linear=False)
    # By the parameter's name, since a model that is made of names has no MultiheadAttention.
    packed = own.get("in_proj_weight")
    if packed is not None and packed.ndim == 2 and len(packed) % 3 == 0:
        return _parts(name, own, "in_proj_weight", ["in_proj.q", "in_proj.k", "in_proj.v"])
    if isinstance(module, nn.MultiheadAttention):  # keys or values differ in size from queries
        return [
            *_whole(name, own, "q_proj_weight", "q_proj"),
            *_whole(name, own, "k_proj_weight", "k_proj"),
            *_whole(name, own, "v_proj_weight", "v_proj"),
        ]
    transposed = _orientation(own)
    if transposed is not None:
        all_views = []
        for attribute in ("gate_up_proj", "down_proj"):
            experts = [f"{expert}.{attribute}" for expert in range(len(own[attribute]))]
            all_views += _parts(name, own, attribute, experts, transposed=transposed)
        return all_views
    weight = own.get("weight")
    if weight is not None and weight.ndim == 3:
        sizes = (getattr(module, "output_size", None), getattr(module, "input_size", None))
        if weight.shape[1:] == sizes:
            return _parts(name, own, "weight", list(map(str, range(len(weight)))))
    return []


def _whole(
    name: str,
    own: Mapping[str, nn.Parameter],
    attribute: str,
    part: str = "",
    *,
    transposed: bool = False,
    linear: bool = True,
) -> list[MatrixView]:
    """Return the matrix that is a whole parameter, if the module has it."""
    parameter = own.get(attribute)
    if parameter is None or parameter.dtype not in FLOATS or parameter.ndim < 2:
        return []
    return _parts(name, own, attribute, [part], transposed=transposed, linear=linear)


def _parts(
    name: str,
    own: Mapping[str, nn.Parameter],
    attribute: str,
    parts: Sequence[str],
    *,
    transposed: bool = False,
    linear: bool = True,
) -> list[MatrixView]:
    """Return the matrices that lie in a parameter one below another."""
    parameter = own[attribute]
    size = len(parameter) // len(parts)
    part_shape = (size, *parameter.shape[1:])
    sides = part_shape
    if size == 1 and parameter.ndim == 3 and linear:  # a stack of experts
        sides = part_shape[1:]
    height = sides[0]
    width = math.prod(sides[1:])
    shape = (width, height) if transposed else (height, width)
    key = join(name, attribute)
    all_views = []
    for number, part in enumerate(parts):
        rows = (number * size, (number + 1) * size)
        view = MatrixView(join(name, part), name, key, shape, rows, part_shape, transposed, linear)
        all_views.append(view)
    return all_views


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
    gate_up = own.get("gate_up_proj")
    down = own.get("down_proj")
    if gate_up is None or down is None or gate_up.ndim != 3 or down.ndim != 3:
        return None
    if len(gate_up) != len(down):
        return None
    height_up, width_up = gate_up.shape[1:]
    height_down, width_down = down.shape[1:]
    if (height_up, width_up) == (2 * width_down, height_down):
        return False
    if (height_up, width_up) == (width_down, 2 * height_down):
        return True
    return None
