"""Base, merged and task models, whose tensors are addressed by param, whatever their files call
them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, groupby

import torch
from torch import Tensor

from fusion_bench_nufilt.nufilt import LowRank
from fusion_bench_nufilt.utils.tensors import digest, is_finite, wide_dtype

from .architecture import Architecture
from .checkpoint import Checkpoint
from .experts import Expert, ExpertRows
from .last_read import LastRead
from .source import Source

EMBEDDING_A = (
    ".lora_embedding_A"  # (rank, tokens); it and B (d, rank) hold the transpose of the update
)


class FullModel:
    """A model with all its weights, in files or in memory.

    By param, ``params`` has the shape of each tensor that the model changes or brings, ``keys`` the
    key of each that it holds in full, and ``pairs`` the keys of the factors A and B of a layer's
    update, with their scaling.
    """

    def __init__(self, source: Source, architecture: Architecture) -> None:
        self.source = source
        self.params: dict[str, tuple[int, ...]] = {}
        self.keys: dict[str, str] = {}
        self.pairs: dict[str, tuple[str, str, float]] = {}
        self.ignored: list[str] = []
        self.left_out: list[str] = []  # names of tied weights that are more than one here alone
        self.head: dict[str, str] = {}  # keys of the task's own head, by param
        self.strength = 1.0  # of its update in a merge
        self.magnitudes: dict[str, str] = {}  # keys of DoRA's row lengths, by param
        self.experts: dict[str, Expert] = {}  # by param, its place in factors of several experts
        self.saved_experts: dict[str, ExpertRows] = {}  # by param, its place in a whole stack
        self._factors: LastRead[tuple[Tensor, Tensor, str]] = LastRead()
        self._trained: dict[
            str, dict[int, int]
        ] = {}  # by param, the stored place of each row that an adapter trained
        self._rows: dict[
            str, list[int]
        ] = {}  # by param, the stored row for each of the base's, or -1 for none
        self._transposed = {param for param, view in architecture.views.items() if view.transposed}
        architecture.split(source)
        self._find_tensors(architecture)

    def _find_tensors(self, architecture: Architecture) -> None:
        for key in self.source.tensors:
            name = architecture.name(key)
            if name not in self.keys or architecture.module_name(key) == name:
                self.keys[name], self.params[name] = key, self.source.tensors[key].shape
        for names in architecture.shared:
            stored = [name for name in names if name in self.keys]
            for name in names if stored else ():
                self.keys.setdefault(name, self.keys[stored[0]])
                self.params.setdefault(name, self.params[stored[0]])
        embedding = architecture.embedding
        if self.source.config.get("tie_word_embeddings") is True and embedding in self.keys:
            # This model's head is its embedding, also where the base has a head of its own.
            for name in architecture.head:
                self.keys.setdefault(name, self.keys[embedding])
                self.params.setdefault(name, self.params[embedding])

    def tell_apart(self, names: Sequence[str]) -> list[object]:
        """Return for each of some names that share a weight what tells its tensor from others."""
        told: list[object] = []
        distinct: list[str] = []
        for name in names:
            key = self.keys.get(name)
            equal = [other for other in distinct if key and self.source.same(key, other)]
            if key and not equal:
                distinct.append(key)
            told.append(equal[0] if equal else key)
        return told

    def tie(self, architecture: Architecture) -> None:
        """Have one tensor for each weight, which goes by its param from now on.

        Until then, each name has its own.
        """
        for name in chain(*architecture.shared):
            if architecture.param_named(name) != name:
                for known in (self.params, self.keys, self.pairs, self.magnitudes, self._rows):
                    known.pop(name, None)

    @property
    def checkpoint(self) -> Checkpoint:
        """The source of a model that is in files."""
        assert isinstance(self.source, Checkpoint)
        return self.source

    def has(self, param: str) -> bool:
        """Return whether the model has a tensor of the base, changed or not."""
        return param in self.keys

    def ignore(self, param: str) -> None:
        """Treat a tensor outside the merged layers as missing."""
        self.ignored.append(param)
        for known in (self.params, self.keys, self.pairs):
            known.pop(param, None)

    def take_head(self, params: Iterable[str]) -> None:
        """Keep some tensors out of the merge, as the task's own head."""
        for param in params:
            self.params.pop(param)
            self.head[param] = self.keys.pop(param)

    def show_rows(self, param: str, rows: Sequence[int]) -> None:
        """Present a tensor with the base's rows: ``rows`` has the number of each here, or -1 to
        take the base's.
        """
        self._rows[param] = [self._stored_row(param, row) for row in rows]
        self.params[param] = (len(rows), *self.params[param][1:])

    def _stored_row(self, param: str, row: int) -> int:
        return self._trained[param].get(row, -1) if param in self._trained else row

    def row(self, param: str, row: int, base: "FullModel") -> Tensor:
        """Read a row of a tensor, flattened, by its number here; an adapter that lacks it returns
        the base's.
        """
        width = math.prod(base.params[param][1:])
        if param in self.keys and (stored := self._stored_row(param, row)) >= 0:
            return self.source.elements(self.keys[param], stored * width, (stored + 1) * width)
        theta_0 = base.source.elements(base.keys[param], row * width, (row + 1) * width)
        return (
            self.elements(param, row * width, (row + 1) * width, theta_0)
            if param in self.pairs
            else theta_0
        )

    def _shown(self, param: str, start: int, stop: int, theta_0: Tensor) -> Tensor:
        """Return some elements of a tensor as :meth:`show_rows` presents it, given the base's."""
        width, pieces = math.prod(self.params[param][1:]), []
        rows = enumerate(self._rows[param][start // width : -(-stop // width)], start // width)
        for shift, run in groupby(rows, lambda pair: pair[1] - pair[0] if pair[1] >= 0 else None):
            numbers = [row for row, _ in run]
            first, last = max(start, numbers[0] * width), min(stop, (numbers[-1] + 1) * width)
            pieces.append(theta_0[first - start : last - start])
            if shift is not None:
                there = first + shift * width, last + shift * width
                pieces[-1] = self.source.elements(self.keys[param], *there).to(theta_0.device)
        return torch.cat(pieces)

    def weight(self, param: str, theta_0: Tensor) -> tuple[Tensor | LowRank, str]:
        """Read a whole tensor, or the factors of a layer's update; return it and the digest of what
        was read.

        ``theta_0`` is the base's tensor, on whose device it is put, and which provides the rows
        that the model lacks.
        """
        read = partial(self.source.read, where=theta_0.device)
        if param in self._rows:
            value = self._shown(param, 0, theta_0.numel(), theta_0.flatten()).reshape(theta_0.shape)
            if not is_finite(value):
                raise ValueError(
                    f"model '{self.source.name}', tensor '{param}' has NaN or infinite values"
                )
            return value, digest(value)
        if param in self.saved_experts:
            value = self.saved_experts[param].read(self.source)
            if not is_finite(value):
                raise ValueError(
                    f"model '{self.source.name}', tensor '{param}' has NaN or infinite values"
                )
            return value.to(theta_0.device), digest(value)
        if param in self.keys:
            return read(self.keys[param])
        key_a, key_b, scaling = self.pairs[param]
        a, b, digests = self._factors.get(
            (key_a, str(theta_0.device)), partial(_read_factors, read, key_a, key_b)
        )
        if param in self.experts:
            a, b = self.experts[param].cut(a, b)
        wide = wide_dtype(a)
        if not is_finite(left := b.to(wide) * scaling):
            what = f"adapter '{self.source.name}', layer '{param}'"
            raise ValueError(f"{what}: B times its scaling of {scaling:g} is too large for {wide}")
        update = LowRank(left, a.to(wide))
        if key_a.endswith(EMBEDDING_A):
            return LowRank(update.right.T, update.left.T), digests
        if param not in self.magnitudes:
            return update, digests
        lengths, digest_m = read(self.magnitudes[param])
        weight = (theta_0.T if param in self._transposed else theta_0).to(wide) + update.product()
        weight *= (lengths.to(wide) / torch.linalg.vector_norm(weight, dim=1))[:, None]
        return (weight.T if param in self._transposed else weight), digests + digest_m

    def at_strength(self, new: Tensor | LowRank, theta_0: Tensor) -> Tensor | LowRank:
        """Return a weight, or the factors of an update, with the update times the model's
        strength.
        """
        if self.strength == 1:
            return new
        if isinstance(new, LowRank):
            return LowRank(new.left * self.strength, new.right)
        wide = torch.promote_types(wide_dtype(theta_0), new.dtype)
        return torch.lerp(theta_0.to(wide), new.to(wide), self.strength)

    def unit(self, param: str) -> int:
        """Return the number of elements of a tensor that are read together, or not at all."""
        if param in self.saved_experts:
            return math.prod(self.params[param])
        if param in self.keys and param not in self._rows:
            return self.source.tensors[self.keys[param]].unit
        return 1

    def elements(self, param: str, start: int, stop: int, theta_0: Tensor) -> Tensor:
        """Return some elements of a flattened tensor that the model has, given the base's."""
        if param in self._rows:
            return self._shown(param, start, stop, theta_0)
        if param in self.saved_experts:
            value = self.saved_experts[param].read(self.source).flatten()[start:stop]
            return value.to(theta_0.device)
        if param in self.keys:
            return self.source.elements(self.keys[param], start, stop).to(theta_0.device)
        if param not in self.pairs:
            return theta_0
        update, _ = self.weight(param, theta_0)
        assert isinstance(update, LowRank)
        if param in self._transposed:
            update = LowRank(update.right.T, update.left.T)
        d_i, wide = update.shape[1], wide_dtype(theta_0)
        first, last = start // d_i, -(-stop // d_i)  # the rows that hold these elements
        rows = LowRank(update.left[first:last], update.right).product().flatten()
        return theta_0.to(wide) + rows[start - first * d_i : stop - first * d_i]


def _read_factors(
    read: Callable[[str], tuple[Tensor, str]], key_a: str, key_b: str
) -> tuple[Tensor, Tensor, str]:
    """Return the factors A and B of an update, and the digest of both."""
    a, digest_a = read(key_a)
    b, digest_b = read(key_b)
    return a, b, digest_a + digest_b
