"""What a model has of a tensor of the base: an :class:`Entry`, which whoever merges reads, whatever
it is in files.

An entry gives the values, or the factors of what the model adds to the base's. :class:`Stored` is a
tensor of a source, and :class:`Rows` presents another entry with its rows in another order; those
of adapters are in ``lora.py`` and ``experts.py``.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusion_bench_nufilt.nufilt.low_rank import LowRank
from fusion_bench_nufilt.utils.tensors import FLOATS, TensorInfo

from .source import Source


@dataclass(frozen=True, eq=False)
class Entry(ABC):
    """What a model has of a tensor.

    ``source`` has its values. ``key`` is that of the tensor which holds it in full, empty where it
    is computed from factors, and ``shape`` the one in which the base stores it. To methods,
    ``theta_0`` is the base's tensor, or the same part of it, on whose device the values are put.
    """

    source: Source
    key: str
    shape: tuple[int, ...]

    @property
    def rank(self) -> int | None:
        """The rank of the factors by which an update is given, None where values are."""
        return None

    @property
    def unit(self) -> int:
        """The number of elements that are read together, or not at all."""
        return 1

    @property
    def info(self) -> TensorInfo | None:
        """What is stored under ``key``."""
        return self.source.tensors[self.key] if self.key else None

    @property
    def dtype(self) -> torch.dtype | None:
        """The floating dtype in which it is held in full, None of any other."""
        return None if self.info is None else FLOATS.get(self.info.dtype)

    @abstractmethod
    def read(self, theta_0: Tensor) -> Tensor | LowRank:
        """Read a whole tensor, or the factors ``(d_o, r)`` and ``(r, d_i)`` of an update."""

    @abstractmethod
    def elements(self, start: int, stop: int, theta_0: Tensor) -> Tensor:
        """Return some elements of the flattened tensor, given the base's."""

    def same(self, other: "Entry") -> bool:
        """Tell whether this is the same tensor, or change of one, as another entry of the model."""
        return self is other

    def in_rows(self, numbers: Sequence[int], shape: tuple[int, ...]) -> "Rows":
        """Return this tensor with its rows in another order, see :class:`Rows`."""
        return Rows(self.source, self.key, shape, self, list(numbers))


@dataclass(frozen=True, eq=False)
class Stored(Entry):
    """A tensor that a source holds."""

    @classmethod
    def of(cls, source: Source, key: str) -> "Stored":
        return cls(source, key, source.tensors[key].shape)

    @property
    def info(self) -> TensorInfo:
        return self.source.tensors[self.key]

    @property
    def unit(self) -> int:
        return self.info.unit

    def read(self, theta_0: Tensor) -> Tensor:
        return self.source.read(self.key, theta_0.device)

    def elements(self, start: int, stop: int, theta_0: Tensor) -> Tensor:
        return self.source.elements(self.key, start, stop).to(theta_0.device)

    def same(self, other: Entry) -> bool:
        return isinstance(other, Stored) and self.source.same(self.key, other.key)


@dataclass(frozen=True, eq=False)
class Rows(Entry):
    """The rows of another entry in the order of the base's."""

    own: Entry
    numbers: list[int]  # for each row of the base, the one in `own`, or -1 to take the base's

    @property
    def numbers_there(self) -> list[int]:
        """The numbers of the rows that are not the base's."""
        return [number for number, own in enumerate(self.numbers) if own >= 0]

    def read(self, theta_0: Tensor) -> Tensor:
        value = self.elements(0, theta_0.numel(), theta_0.flatten()).reshape(theta_0.shape)
        self.source.check_finite(self.key, value)
        return value

    def elements(self, start: int, stop: int, theta_0: Tensor) -> Tensor:
        # Each reading opens the file: rows that follow each other in both models are read at once.
        width = math.prod(self.shape[1:])
        pieces = []
        end = start
        end_row = -(-stop // width)
        while end < stop:
            first = end
            row = first // width
            end = min(stop, self._end_of_run(row, end_row) * width)
            piece = theta_0[first - start : end - start]
            if self.numbers[row] >= 0:
                shift = (self.numbers[row] - row) * width
                piece = self.own.elements(first + shift, end + shift, piece)
            pieces.append(piece)
        return torch.cat(pieces)

    def _end_of_run(self, row: int, limit: int) -> int:
        """Return the row after the last one, below a limit, that is read together with a row."""
        first = self.numbers[row]
        end = row + 1
        while end < limit:
            follows = self.numbers[end] == first + end - row
            if first < 0:
                follows = self.numbers[end] < 0
            if not follows:
                break
            end += 1
        return end

    def same(self, other: Entry) -> bool:
        if not isinstance(other, Rows) or self.numbers != other.numbers:
            return False
        return self.own.same(other.own)

    def in_rows(self, numbers: Sequence[int], shape: tuple[int, ...]) -> "Rows":
        composed = [-1 if number < 0 else self.numbers[number] for number in numbers]
        return replace(self, numbers=composed, shape=shape)
