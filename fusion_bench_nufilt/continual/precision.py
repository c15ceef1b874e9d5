"""Weights in 16 bits are widened for what computes with whole models: decompositions know no 16
bits, and an optimizer's steps would be rounded away.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from fusion_bench_nufilt.utils.tensors import compute_dtype


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype of every parameter and buffer, by name."""
    return {name: tensor.dtype for name, tensor in tensors_of(model)}


def widen(model: nn.Module) -> None:
    """Give the floating-point weights of a model at least the digits of float32, in place."""
    for _, tensor in tensors_of(model):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(compute_dtype(tensor))


def round_to(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Round the weights of a model to dtypes by name, in place."""
    for name, tensor in tensors_of(model):
        tensor.data = tensor.data.to(dtypes.get(name, tensor.dtype))


@contextmanager
def widened(*models: nn.Module) -> Iterator[None]:
    """Widen models within the block, and round what they hold then to their own dtypes after it.

    A weight that nobody writes has the same bits as before.
    """
    dtypes: dict[int, tuple[Tensor, torch.dtype]] = {}
    for model in models:
        for _, tensor in tensors_of(model):
            # Two of the models may be one, or share weights.
            dtypes.setdefault(id(tensor), (tensor, tensor.dtype))
        widen(model)
    try:
        yield
    finally:
        for tensor, dtype in dtypes.values():
            tensor.data = tensor.data.to(dtype)


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a model, each once, and its buffers, with their names."""
    return chain(model.named_parameters(), model.named_buffers())
