"""What an adapter changes of a tensor: an update by its factors, those of some rows, and DoRA."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion_bench_nufilt.nufilt.low_rank import LowRank
from fusion_bench_nufilt.utils.tensors import compute_dtype, is_finite

from .entries import Entry
from .peft_layers import EMBEDDING_A, WITH_PEFT

Pair = tuple[Tensor, Tensor]  # A and B

_CPU = torch.device("cpu")


class LastFactors:
    """Keeps the factors that were read last, a pair for each thread that may be reading, so that
    each input is read once.

    Factors of fused experts hold those of all experts of a parameter, which are merged one after
    another, and an update outside the merged layers is added piece by piece. A pair is read by one
    thread, and the others wait for it. A copy in another process begins empty.
    """

    def __init__(self) -> None:
        self._factors: OrderedDict[tuple[str, str], Pair] = OrderedDict()
        self._reading = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def get(self, key: tuple[str, str], read: Callable[[], Pair]) -> Pair:
        """Return the factors of a key and a device, which are read if they are not there."""
        with self._reading:
            if key not in self._factors:
                self._factors[key] = read()
                while len(self._factors) > max(4, torch.get_num_threads()):
                    self._factors.popitem(last=False)
            self._factors.move_to_end(key)
            return self._factors[key]


@dataclass(frozen=True, eq=False)
class Factors(Entry):
    """The factors of an update of a tensor: scaling times B A."""

    name: str  # of the tensor, in messages
    key_a: str
    key_b: str
    rank_in_file: int
    scaling: float
    is_transposed: bool  # whether the tensor is stored as (d_i, d_o)
    last: LastFactors  # of the adapter

    @property
    def rank(self) -> int:
        return self.rank_in_file

    @property
    def of_embedding(self) -> bool:
        return self.key_a.endswith(EMBEDDING_A)

    def pair(self, device: torch.device) -> Pair:
        """Read A ``(r, d_i)`` and B ``(d_o, r)``."""

        def read_pair() -> Pair:
            return self.source.read(self.key_a, device), self.source.read(self.key_b, device)

        return self.last.get((self.key_a, str(device)), read_pair)

    def read(self, theta_0: Tensor) -> LowRank:
        """Read the factors in float32 at least, with the scaling."""
        a, b = self.pair(theta_0.device)
        wide = compute_dtype(a)
        left = b.to(wide) * self.scaling
        right = a.to(wide)
        # What was read is finite, so that only the scaling can be at fault.
        if not is_finite(left):
            raise ValueError(
                f"adapter '{self.source.name}', layer '{self.name}': B times its scaling of "
                f"{self.scaling:g} is too large for {wide}"
            )
        if self.of_embedding:
            return LowRank(right.T, left.T)
        return LowRank(left, right)

    def elements(self, start: int, stop: int, theta_0: Tensor) -> Tensor:
        update = self.read(theta_0)
        if self.is_transposed:
            update = LowRank(update.right.T, update.left.T)
        return _with_update(update, start, stop, theta_0)

    def same(self, other: Entry) -> bool:
        if not isinstance(other, Factors) or self.scaling != other.scaling:
            return False
        a, b = self.pair(_CPU)
        if self.of_embedding != other.of_embedding:
            # The factors of an embedding are the head's transposed, to which peft may tie it.
            a, b = b.T, a.T
        other_a, other_b = other.pair(_CPU)
        return torch.equal(a, other_a) and torch.equal(b, other_b)


@dataclass(frozen=True, eq=False)
class FactorsOfRows(Entry):
    """The factors of updates of several parts of a tensor, by the rows that each changes."""

    parts: tuple[tuple[slice, Factors], ...] = ()

    @property
    def rank(self) -> int:
        return sum(part.rank for _, part in self.parts)

    def with_part(self, rows: slice, part: Factors) -> "FactorsOfRows":
        return replace(self, parts=(*self.parts, (rows, part)))

    def read(self, theta_0: Tensor) -> LowRank:
        factors = [part.read(theta_0) for _, part in self.parts]
        # Each has its rows of the layer, and columns of the left factor for itself.
        left = torch.zeros(
            self.shape[0], self.rank, dtype=factors[0].left.dtype, device=theta_0.device
        )
        first = 0
        for (rows, part), update in zip(self.parts, factors, strict=True):
            left[rows, first : first + part.rank] = update.left
            first += part.rank
        return LowRank(left, torch.cat([update.right for update in factors]))

    def elements(self, start: int, stop: int, theta_0: Tensor) -> Tensor:
        return _with_update(self.read(theta_0), start, stop, theta_0)


@dataclass(frozen=True, eq=False)
class Dora(Entry):
    """The base's weight with an update, each row or column of which has the length that the adapter
    learned.
    """

    update: Factors
    lengths: str  # the key

    def read(self, theta_0: Tensor) -> Tensor:
        factors = self.update.read(theta_0)
        lengths = self.source.read(self.lengths, theta_0.device)
        if self.update.is_transposed:
            return _dora(theta_0.T, factors, lengths).T
        return _dora(theta_0, factors, lengths)

    def elements(self, start: int, stop: int, theta_0: Tensor) -> Tensor:
        """Return some rows, which are read as a whole."""
        # Of an embedding, DoRA learns the lengths of columns, over all tokens.
        if self.update.of_embedding:
            raise ValueError(
                f"adapter '{self.source.name}' changes '{self.update.name}' by DoRA, so that the "
                "rows of its new tokens can't be told one by one: merge it into its base "
                f"{WITH_PEFT}, or leave its tokens out with --tokenizer base"
            )
        factors = self.update.read(theta_0)
        width = factors.shape[1]
        rows = slice(start // width, stop // width)
        lengths = self.source.read(self.lengths, theta_0.device)
        of_rows = LowRank(factors.left[rows], factors.right)
        return _dora(theta_0.reshape(-1, width), of_rows, lengths[rows]).flatten()

    def same(self, other: Entry) -> bool:
        if not isinstance(other, Dora) or not self.update.same(other.update):
            return False
        return self.source.same(self.lengths, other.lengths)


def _with_update(update: LowRank, start: int, stop: int, theta_0: Tensor) -> Tensor:
    """Return elements of the base's flattened tensor with the update added."""
    width = update.shape[1]
    first_row = start // width
    end_row = -(-stop // width)
    # The rows of this piece alone: a whole product would take the memory of the tensor.
    rows = LowRank(update.left[first_row:end_row], update.right).product().flatten()
    offset = first_row * width
    return theta_0.to(compute_dtype(theta_0)) + rows[start - offset : stop - offset]


def _dora(theta_0: Tensor, update: LowRank, lengths: Tensor) -> Tensor:
    """Return rows of theta_0 + B A, each brought to the length that the adapter learned."""
    weight = theta_0.to(update.left.dtype) + update.product()
    weight *= (lengths.to(weight.dtype) / torch.linalg.vector_norm(weight, dim=1))[:, None]
    return weight
