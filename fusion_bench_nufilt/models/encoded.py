"""Tensors that a file holds otherwise than as their values."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fusion_bench_nufilt.utils.tensors import FLOATS, TensorFile, TensorInfo


@dataclass(frozen=True)
class Encoded(TensorInfo):
    """A tensor in a file that is decoded when it is read; ``shape`` and ``dtype`` are those in
    which it is read.
    """

    spacing: ClassVar[float]  # of the stored values, relative to the power of two below

    @abstractmethod
    def read(self, files: Mapping[str, TensorFile]) -> Tensor:
        """Return the values."""

    @abstractmethod
    def around(self, start: int, stop: int) -> tuple["Encoded", int]:
        """Return the part that holds elements ``start`` to ``stop`` and can be decoded by itself,
        and the number of its first element.
        """

    def elements(self, files: Mapping[str, TensorFile], start: int, stop: int) -> Tensor:
        """Return some elements of the flattened tensor."""
        part, first = self.around(start, stop)
        return part.read(files).flatten()[start - first : stop - first]


def relative_spacing(stored: TensorInfo) -> float:
    """Return the spacing of the values of a stored tensor, relative to the power of two below."""
    if isinstance(stored, Encoded):
        return stored.spacing
    return torch.finfo(FLOATS[stored.dtype]).eps
