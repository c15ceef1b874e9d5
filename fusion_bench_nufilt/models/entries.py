"""What a model has of a tensor of the base: an :class:`Entry`, which whoever merges reads, whatever
it is in files.

An entry gives the values, or the factors of what the model adds to the base's. :class:`Stored` is a
tensor of a source, :class:`Unchanged` is the base's own, :class:`Rows` presents another entry with
its rows in another order, and :class:`Grown` the base's with rows of new tokens; those of adapters
are in ``lora.py`` and ``experts.py``.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fusion_bench_nufilt.nufilt.low_rank import LowRank
from fusion_bench_nufilt.utils.tensors import CHUNK_BYTES, FLOATS, TensorInfo, compute_dtype

from .source import Source


@dataclass(frozen=True, eq=False)
class Entry(ABC):
    """What a model has of a tensor.

    ``source`` has its values. ``key`` is that of the tensor which holds it in full, empty where
    none does, and ``shape`` the one in which the base stores it. To methods,
    ``theta_0`` is the base's tensor, or the same part of it, on whose device the values are put.
    """

    source: Source
    key: str
    shape: tuple[int, ...]

    @property
    def rank(self) -> int | None:
        """The rank of the factors by which an update is given, zero where there is none, and None
        where values are given.
        """
        return None

    @property
    def unit(self) -> int:
        """The number of elements that are read together, or not at all."""
        return 1

    @property
    def is_stored(self) -> bool:
        """Whether the source holds it in full, in whatever rows."""
        return bool(self.key)

    @property
    def info(self) -> TensorInfo | None:
        """What is stored under ``key``."""
        return self.source.tensors[self.key] if self.is_stored else None

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

    def in_rows(self, numbers: Sequence[int], shape: tuple[int, ...]) -> "Entry":
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
class Unchanged(Entry):
    """The base's tensor, which an adapter leaves as it is, in whatever rows."""

    @property
    def rank(self) -> int:
        return 0

    def read(self, theta_0: Tensor) -> Tensor:
        return theta_0

    def elements(self, start: int, stop: int, theta_0: Tensor) -> Tensor:
        return theta_0

    def in_rows(self, numbers: Sequence[int], shape: tuple[int, ...]) -> Entry:
        return replace(self, shape=shape)


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


class PartOfMean(NamedTuple):
    """A row of an entry in the mean that is the row of a new token."""

    entry: Entry
    row: int
    weight: float
    beneath: Entry  # the tensor to which the entry may be an update


_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


@dataclass(frozen=True, eq=False)
class Grown(Entry):
    """The base's tensor with the rows of new tokens, which may lie among those that pad it.

    Each is the mean of the rows of the models that have it, by its number in ``new_rows``: without
    any, that of the base's, around which transformers draws new ones. A row of no token is zero.
    """

    own: Entry
    new_rows: Mapping[int, Sequence[PartOfMean]]

    def read(self, theta_0: Tensor) -> Tensor:
        return self.elements(0, math.prod(self.shape), theta_0).reshape(self.shape)

    def elements(self, start: int, stop: int, theta_0: Tensor) -> Tensor:
        """Return some elements, in the widest dtype of those that have them."""
        end = math.prod(self.own.shape)
        of_base = self.own.elements(min(start, end), min(stop, end), theta_0)
        return self._with_new_rows(of_base, start, stop)

    def grow(self, weight: Tensor) -> Tensor:
        """Return a layer, which is merged in the base's rows, with those of new tokens."""
        values = self._with_new_rows(weight.flatten().cpu(), 0, math.prod(self.shape))
        return values.reshape(self.shape)

    def _with_new_rows(self, of_base: Tensor, start: int, stop: int) -> Tensor:
        width = math.prod(self.shape[1:])
        values = torch.cat([of_base, of_base.new_zeros(stop - start - of_base.numel())])
        for row, parts in self.new_rows.items():
            first = max(start, row * width)
            last = min(stop, (row + 1) * width)
            if first >= last:
                continue
            new = self._mean(parts)
            values = values.to(torch.promote_types(values.dtype, new.dtype))
            values[first - start : last - start] = new[first - row * width : last - row * width]
        return values

    def _mean(self, parts: Sequence[PartOfMean]) -> Tensor:
        """Return the row of a new token, in float32 at least unless one model has it."""
        if not parts:
            return self._mean_of_base
        # That of a single model keeps its bits, and the first one stays where all weights are zero.
        mean = self._row(parts[0])
        weight = parts[0].weight
        for part in parts[1:]:
            row = self._row(part)
            weight += part.weight
            if weight > 0:
                wide = compute_dtype(mean)
                mean = torch.lerp(mean.to(wide), row.to(wide), part.weight / weight)
        return mean

    def _row(self, part: PartOfMean) -> Tensor:
        entry = part.entry
        width = math.prod(self.shape[1:])
        start = part.row * width
        theta_0 = _NOTHING
        if part.row < part.beneath.shape[0]:
            theta_0 = part.beneath.elements(start, start + width, theta_0)
        row = entry.elements(start, start + width, theta_0)
        entry.source.check_finite(entry.key or self.key, row)
        return row

    @cached_property
    def _mean_of_base(self) -> Tensor:
        shape = self.own.shape
        width = math.prod(shape[1:])
        length = max(1, CHUNK_BYTES // (8 * width)) * width
        total = torch.zeros(width, dtype=torch.float64, device="cpu")
        for start in range(0, shape[0] * width, length):
            stop = min(start + length, shape[0] * width)
            rows = self.own.elements(start, stop, _NOTHING)
            total += rows.double().view(-1, width).sum(0)
        return (total / shape[0]).float()

    @property
    def rows_of_no_model(self) -> list[int]:
        """The rows of new tokens that no model has."""
        return [row for row, parts in self.new_rows.items() if not parts]

    def differs(self, row: int) -> bool:
        """Tell whether models have other values in the row of a new token, as far as these are on
        this disk.
        """
        local = [part for part in self.new_rows[row] if not part.entry.source.remote]
        rows = [self._row(part).double() for part in local]
        return not all(torch.equal(rows[0], other) for other in rows[1:])
