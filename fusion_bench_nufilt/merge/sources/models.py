"""Base, merged and task models, whose tensors are addressed by slot, whatever their files call them."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fusion_bench_nufilt.core import LowRank
from fusion_bench_nufilt.core.weights import is_finite, wide_dtype
from fusion_bench_nufilt.layers.targets import matches
from fusion_bench_nufilt.storage.tensors import digest

from ..architecture import Architecture
from .checkpoint import Checkpoint, is_adapter
from .source import Source, some

PREFIX = "base_model.model."
_EMBEDDING_A = ".lora_embedding_A"  # (rank, tokens); it and B (d, rank) hold the transpose of the update
# Options of peft that change the base's own weights or add other terms than B A.
_REFUSED = {
    "lora_bias": "lora_bias",
    "use_qalora": "QALoRA",
    "kasa_config": "KaSA, which truncates the base",
    "arrow_config": "Arrow, which mixes several adapters by the input",
    "layer_replication": "layer_replication, which adds layers",
    "target_parameters": "target_parameters",
    "alora_invocation_tokens": "activated LoRA, which acts on some tokens only",
}
_TOKENS = ".token_adapter.trainable_tokens_delta"
_REFUSED_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


class FullModel:
    """A model with all its weights, in files or in memory.

    By slot, ``slots`` has the shape of each tensor that the model changes or brings, ``keys`` the key of each that it
    holds in full, and ``pairs`` the keys of the factors A and B of a layer's update, with their scaling.
    """

    def __init__(self, source: Source, architecture: Architecture) -> None:
        self.source = source
        self.slots: dict[str, tuple[int, ...]] = {}
        self.keys: dict[str, str] = {}
        self.pairs: dict[str, tuple[str, str, float]] = {}
        self.ignored: list[str] = []
        self.twins: dict[str, str] = {}  # the slot of each further key that the base ties, such as an untied head
        self.head: dict[str, str] = {}  # keys of the task's own head, by slot
        self.strength = 1.0  # of its update in a merge
        self.magnitudes: dict[str, str] = {}  # keys of DoRA's row lengths, by slot
        self._trained: dict[str, dict[int, int]] = {}  # by slot, the stored place of each row that an adapter trained
        self._rows: dict[str, list[int]] = {}  # by slot, the stored row for each of the base's, or -1 for none
        self._transposed = {slot for slot, view in architecture.views.items() if view.transposed}
        architecture.split(source)
        self._find_tensors(architecture)

    def _find_tensors(self, architecture: Architecture) -> None:
        for slot, keys in architecture.by_slot(self.source).items():
            # Where a model that the base ties is stored untied, the slot's own name wins: the embedding, not the head.
            key = next((key for key in keys if architecture.module_name(key) == slot), keys[0])
            self.keys[slot], self.slots[slot] = key, self.source.tensors[key].shape
            self.twins |= {twin: slot for twin in keys if twin != key}

    @property
    def checkpoint(self) -> Checkpoint:
        """The source of a model that is in files."""
        assert isinstance(self.source, Checkpoint)
        return self.source

    def has(self, slot: str) -> bool:
        """Return whether the model has a tensor of the base, changed or not."""
        return slot in self.keys

    def ignore(self, slot: str) -> None:
        """Treat a tensor outside the merged layers as missing."""
        self.ignored.append(slot)
        for known in (self.slots, self.keys, self.pairs):
            known.pop(slot, None)

    def take_head(self, slots: Iterable[str]) -> None:
        """Keep some tensors out of the merge, as the task's own head."""
        for slot in slots:
            self.slots.pop(slot)
            self.head[slot] = self.keys.pop(slot)

    def show_rows(self, slot: str, rows: Sequence[int]) -> None:
        """Present a tensor with the base's rows: ``rows`` has the number of each here, or -1 to take the base's."""
        self._rows[slot] = [self._stored_row(slot, row) for row in rows]
        self.slots[slot] = (len(rows), *self.slots[slot][1:])

    def _stored_row(self, slot: str, row: int) -> int:
        return self._trained[slot].get(row, -1) if slot in self._trained else row

    def row(self, slot: str, row: int, base: "FullModel") -> Tensor:
        """Read a row of a tensor, flattened, by its number here; an adapter that lacks it returns the base's."""
        width = math.prod(base.slots[slot][1:])
        if slot in self.keys and (stored := self._stored_row(slot, row)) >= 0:
            return self.source.elements(self.keys[slot], stored * width, (stored + 1) * width)
        theta_0 = base.source.elements(base.keys[slot], row * width, (row + 1) * width)
        return self.elements(slot, row * width, (row + 1) * width, theta_0) if slot in self.pairs else theta_0

    def _shown(self, slot: str, start: int, stop: int, theta_0: Tensor) -> Tensor:
        """Return some elements of a tensor as :meth:`show_rows` presents it, given the base's."""
        width, pieces = math.prod(self.slots[slot][1:]), []
        rows = enumerate(self._rows[slot][start // width : -(-stop // width)], start // width)
        for shift, run in groupby(rows, lambda pair: pair[1] - pair[0] if pair[1] >= 0 else None):
            numbers = [row for row, _ in run]
            first, last = max(start, numbers[0] * width), min(stop, (numbers[-1] + 1) * width)
            pieces.append(theta_0[first - start : last - start])
            if shift is not None:
                there = first + shift * width, last + shift * width
                pieces[-1] = self.source.elements(self.keys[slot], *there).to(theta_0.device)
        return torch.cat(pieces)

    def weight(self, slot: str, theta_0: Tensor) -> tuple[Tensor | LowRank, str]:
        """Read a whole tensor, or the factors of a layer's update; return it and the digest of what was read.

        ``theta_0`` is the base's tensor, on whose device it is put, and which provides the rows that the model lacks.
        """
        read = partial(self.source.read, where=theta_0.device)
        if slot in self._rows:
            value = self._shown(slot, 0, theta_0.numel(), theta_0.flatten()).reshape(theta_0.shape)
            if not is_finite(value):
                raise ValueError(f"model '{self.source.name}', tensor '{slot}' has NaN or infinite values")
            return value, digest(value)
        if slot in self.keys:
            return read(self.keys[slot])
        key_a, key_b, scaling = self.pairs[slot]
        (a, digest_a), (b, digest_b) = read(key_a), read(key_b)
        wide = wide_dtype(a)
        if not is_finite(left := b.to(wide) * scaling):
            what = f"adapter '{self.source.name}', layer '{slot}'"
            raise ValueError(f"{what}: B times its scaling of {scaling:g} is too large for {wide}")
        update, digests = LowRank(left, a.to(wide)), digest_a + digest_b
        if key_a.endswith(_EMBEDDING_A):
            return LowRank(update.right.T, update.left.T), digests
        if slot not in self.magnitudes:
            return update, digests
        lengths, digest_m = read(self.magnitudes[slot])
        weight = (theta_0.T if slot in self._transposed else theta_0).to(wide) + update.product()
        weight *= (lengths.to(wide) / torch.linalg.vector_norm(weight, dim=1))[:, None]
        return (weight.T if slot in self._transposed else weight), digests + digest_m

    def at_strength(self, new: Tensor | LowRank, theta_0: Tensor) -> Tensor | LowRank:
        """Return a weight, or the factors of an update, with the update times the model's strength."""
        if self.strength == 1:
            return new
        if isinstance(new, LowRank):
            return LowRank(new.left * self.strength, new.right)
        wide = torch.promote_types(wide_dtype(theta_0), new.dtype)
        return torch.lerp(theta_0.to(wide), new.to(wide), self.strength)

    def elements(self, slot: str, start: int, stop: int, theta_0: Tensor) -> Tensor:
        """Return some elements of a flattened tensor that the model has, given the base's."""
        if slot in self._rows:
            return self._shown(slot, start, stop, theta_0)
        if slot in self.keys:
            return self.source.elements(self.keys[slot], start, stop).to(theta_0.device)
        if slot not in self.pairs:
            return theta_0
        update, _ = self.weight(slot, theta_0)
        assert isinstance(update, LowRank)
        if slot in self._transposed:
            update = LowRank(update.right.T, update.left.T)
        d_i, wide = update.shape[1], wide_dtype(theta_0)
        first, last = start // d_i, -(-stop // d_i)  # the rows that hold these elements
        rows = LowRank(update.left[first:last], update.right).product().flatten()
        return theta_0.to(wide) + rows[start - first * d_i : stop - first * d_i]


class LoraAdapter(FullModel):
    r"""A peft LoRA adapter: :math:`\theta_t = \theta_0 + s\,B A` for its targets, full tensors for `modules_to_save`.

    Other kinds of adapters are refused. What an adapter neither changes nor brings is as in the base.
    """

    def __init__(self, checkpoint: Checkpoint, architecture: Architecture) -> None:
        self.config: Mapping[str, Any] = checkpoint.adapter_config
        name = checkpoint.name
        if (kind := self.config.get("peft_type")) != "LORA":
            raise ValueError(f"adapter '{name}' is of type {kind}: only LORA can be merged")
        for key, what in _REFUSED.items():
            if self.config.get(key):
                raise ValueError(f"adapter '{name}' uses {what}: merge it into its base with peft, give that folder")
        if (start := str(self.config.get("init_lora_weights", True))).startswith(_REFUSED_INITS):
            remedy = "save it with peft's path_initial_model_for_weight_conversion"
            raise ValueError(f"adapter '{name}' was initialised with {start}, which changes the base as well: {remedy}")
        super().__init__(checkpoint, architecture)

    def has(self, slot: str) -> bool:
        return slot not in self.ignored  # what an adapter does not change is the base's

    def _find_tensors(self, architecture: Architecture) -> None:
        unknown, tensors = [], self.source.tensors
        saved: defaultdict[str, list[str]] = defaultdict(list)  # whole tensors by slot
        for key, info in tensors.items():
            name = key.removeprefix(PREFIX).replace(".base_layer.bias", ".bias")  # trained biases
            module, is_a, _ = name.partition(_EMBEDDING_A if _EMBEDDING_A in name else ".lora_A.weight")
            partner = re.sub(r"\.lora_(embedding_)?B(\.weight)?$", r".lora_\1A\2", key)
            if is_a and len(info.shape) == 2:
                self._add_pair(architecture.slot(f"{module}.weight"), module, key)
            elif name.endswith(_TOKENS):
                self._add_tokens(architecture, name.removesuffix(_TOKENS), key)
            elif self.config.get("use_dora") and name.endswith(".lora_magnitude_vector"):
                slot = architecture.slot(name.removesuffix(".lora_magnitude_vector") + ".weight")
                self.magnitudes[slot] = key
            elif ".base_layer." in name:
                continue  # the base's own weight, which peft saves along with an adapted embedding or head
            elif ".lora_" not in name:
                slot = architecture.slot(name)
                saved[slot].append(key)
                self.keys[slot], self.slots[slot] = key, info.shape
            elif partner == key or partner not in tensors:
                unknown.append(key)
        self._check_tied(architecture, saved)
        promised = {"use_dora": self.pairs.keys() <= self.magnitudes.keys(), "trainable_token_indices": self._trained}
        if lost := [option for option, there in promised.items() if self.config.get(option) and not there]:
            what = f"uses {some(lost)} and lacks tensors of it"
            raise ValueError(f"adapter '{self.source.name}' {what}: merge it into its base with peft")
        if unknown:
            raise ValueError(f"adapter '{self.source.name}': {some(unknown)}: no LoRA of a linear layer")

    def _check_tied(self, architecture: Architecture, saved: Mapping[str, Sequence[str]]) -> None:
        """Refuse a full tensor that was trained apart from the one to which the base ties it."""
        trained = self.config.get("modules_to_save") or ()
        for slot, keys in saved.items():
            if len(tied := architecture.names(slot)) < 2:
                continue
            alone = len(keys) == 1 and any(f".{keys[0]}".endswith(f".{module}.weight") for module in trained)
            if alone or len({self.source.read(key)[1] for key in keys if len(keys) > 1}) > 1:
                ties = f"'{keys[0]}' apart from what the base ties it to ({some(tied)})"
                remedy = "save the base with tie_word_embeddings=False, and merge into that"
                raise ValueError(f"adapter '{self.source.name}' trained {ties}: {remedy}")

    def _add_tokens(self, architecture: Architecture, module: str, key: str) -> None:
        """Note the rows of an embedding that the adapter trained, which replace the base's."""
        slot, numbers = architecture.slot(f"{module}.weight"), self.config.get("trainable_token_indices")
        if isinstance(numbers, dict):
            numbers = next((numbers[name] for name in numbers if f".{module}".endswith(f".{name}")), None)
        count, rows = self.source.tensors[key].shape[0], architecture.rows(slot)
        if not numbers or len(numbers) != count or max(numbers) >= rows or slot in {*self.keys, *self.pairs}:
            what = f"{count} rows for the tokens {numbers} of '{slot}' with {rows} rows"
            raise ValueError(f"adapter '{self.source.name}' has {what}: merge it into its base with peft")
        self._trained[slot] = {number: place for place, number in enumerate(numbers)}
        self.keys[slot], self.slots[slot] = key, self.source.tensors[key].shape
        self.show_rows(slot, range(rows))

    def _add_pair(self, slot: str, module: str, key_a: str) -> None:
        """Note the factors A ``(rank, d_i)`` and B ``(d_o, rank)`` of a layer's update, and their scaling."""
        name, tensors = self.source.name, self.source.tensors
        key_b, transposed = re.sub(r"\.lora_(embedding_)?A", r".lora_\1B", key_a), key_a.endswith(_EMBEDDING_A)
        if key_b not in tensors:
            raise ValueError(f"adapter '{name}' has '{key_a}' and no '{key_b}'")
        self.source.check_floats((key_a, key_b))
        shape_a, shape_b = tensors[key_a].shape, tensors[key_b].shape
        rank, d_i = shape_a
        expected = self._pattern("rank_pattern", module, self.config.get("r", rank))
        if len(shape_b) != 2 or not rank == shape_b[1] == expected:
            shapes = f"A is {shape_a}, B {shape_b}, and the rank in its config {expected}"
            raise ValueError(f"adapter '{name}', '{module}': {shapes}: they do not belong together")
        if slot in {*self.pairs, *self.keys}:
            raise ValueError(
                f"adapter '{name}' changes '{slot}' twice, as '{module}' too: merge it into its base with peft"
            )
        if self.config.get("fan_in_fan_out") and slot not in self._transposed and not transposed:
            none = f"'{slot}' of the base is none"
            raise ValueError(f"adapter '{name}' is for transposed layers (fan_in_fan_out), and {none}")
        alpha = self._pattern("alpha_pattern", module, self.config.get("lora_alpha", 8))
        scaling = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        self.pairs[slot] = key_a, key_b, scaling
        self.slots[slot] = (d_i, shape_b[0]) if transposed or slot in self._transposed else (shape_b[0], d_i)

    def _pattern(self, field: str, module: str, default: Any) -> Any:
        """Return the value of the first expression that matches the end of a module's name, as peft does."""
        of = f"adapter '{self.source.name}', {field}"
        values = self.config.get(field) or {}
        return next((values[key] for key in values if matches(rf"(.*\.)?({key})", module, of=of)), default)


def open_task(name: str, architecture: Architecture, strength: float) -> FullModel:
    checkpoint = Checkpoint.open(name)
    task = (LoraAdapter if is_adapter(checkpoint.folder) else FullModel)(checkpoint, architecture)
    task.strength = strength
    return task
