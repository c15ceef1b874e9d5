"""Where a merge reads a model's tensors: what the files of a checkpoint and a model in memory have
in common.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusion_bench_nufilt.utils.tensors import CHUNK_BYTES, FLOATS, TensorFile, TensorInfo

# What training wraps a model or its layers in, by the name that this adds to those of tensors.
# That of DistributedDataParallel and of DeepSpeed is "module", at the start of a name.
_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
Parts = Sequence[tuple[int, int]]  # first and last row of each part of a tensor


class Source(ABC):
    """The tensors of a model.

    ``name`` is the user's name for the model, and ``label`` one for files that others will see.
    ``tensors`` describes those that a merge works on, by key; ``whole`` describes them as they are
    stored, before :meth:`split`.
    """

    name: str
    label: Any
    config: Any  # the content of config.json
    tensors: Mapping[str, TensorInfo]
    whole: Mapping[str, TensorInfo]
    parts: Mapping[str, Parts] = {}
    opened: Mapping[str, TensorFile] = {}  # the files that are read
    remote = False  # whether the weights are still on the hub
    in_memory = False

    @abstractmethod
    def read(self, key: str, device: torch.device | str = "cpu") -> tuple[Tensor, str]:
        """Read a tensor, whose values must be finite, to a device; return it and the digest of its
        bytes.
        """

    @abstractmethod
    def elements(self, key: str, start: int, stop: int) -> Tensor:
        """Read the elements ``start`` to ``stop`` of a flattened tensor."""

    def same(self, key: str, other: str) -> bool:
        """Tell whether two tensors hold the same values; only floating point is compared."""
        info = self.tensors[key]
        if key == other or not {info.dtype, self.tensors[other].dtype} <= FLOATS.keys():
            return True
        if info.shape != self.tensors[other].shape:
            return False
        numel = math.prod(info.shape)
        # In pieces, since two embeddings may not fit; in float64, which holds the values of every
        # other dtype, so that a copy in another dtype is the same.
        length = CHUNK_BYTES // 8
        for start in range(0, numel, length):
            stop = min(start + length, numel)
            values = self.elements(key, start, stop).double()
            other_values = self.elements(other, start, stop).double()
            if not torch.equal(values, other_values):
                return False
        return True

    def split(self, parts: Mapping[str, Parts]) -> None:
        """Make groups of rows of some tensors tensors of their own, under the keys that
        :func:`part` gives them.
        """
        self.parts = parts
        self.tensors = split_rows(self.whole, parts)

    def check_unwrapped(self, names: Iterable[str]) -> None:
        """Raise a ValueError if names that are not looked for are those of a wrapper for
        training.
        """
        for name in names:
            parts = name.split(".")
            if "base_layer" in parts:
                raise ValueError(
                    f"model '{self.name}' was saved from a model of peft, with an adapter beside "
                    f"its weights: '{name}'. Give what merge_and_unload() returns"
                )
            wrappers = [part for part in parts if part in _WRAPPERS]
            if parts[0] == "module":
                wrappers.append("module")
            if wrappers:
                made_by = _WRAPPERS.get(wrappers[0], "DistributedDataParallel or DeepSpeed")
                raise ValueError(
                    f"model '{self.name}' was saved from the wrapper of {made_by}: the name of "
                    f"'{name}' has '{wrappers[0]}.'. {self._unwrapping(wrappers[0])}"
                )

    def _unwrapping(self, wrapper: str) -> str:
        """Return how a wrapper is taken out of the names of the tensors."""
        return f"Give the model that is inside of '{wrapper}'"

    def check_not_empty(self, keys: Iterable[str]) -> None:
        """Raise a ValueError that names tensors of which nothing but a placeholder was saved."""
        empty = [key for key in keys if 0 in self.tensors[key].shape]
        if empty:
            raise ValueError(
                f"model '{self.name}' has {len(empty)} empty tensors: "
                f"{format_names(empty)}. DeepSpeed "
                "ZeRO-3 leaves these where a model is saved without its gathered weights: save it "
                "again with save_pretrained(FOLDER, state_dict=accelerator.get_state_dict(model))"
            )

    def check_floats(self, keys: Iterable[str]) -> None:
        """Raise a ValueError that names a tensor if one that the merge computes with is not
        floating point.
        """
        for key in keys:
            dtype = self.tensors[key].dtype
            if dtype not in FLOATS:
                raise ValueError(
                    f"model '{self.name}', tensor '{key}' is stored as {dtype}: quantised weights "
                    f"can't be merged, only {', '.join(FLOATS)}; name the model it was quantised "
                    "from"
                )


def part(key: str, rows: tuple[int, int]) -> str:
    return f"{key}[{rows[0]}:{rows[1]}]"


def split_rows(
    tensors: Mapping[str, TensorInfo], parts: Mapping[str, Parts]
) -> dict[str, TensorInfo]:
    """Return the tensors; those in ``parts`` are replaced by their groups of rows, under the keys
    of :func:`part`.
    """
    split: dict[str, TensorInfo] = {}
    for key, info in tensors.items():
        for rows in parts.get(key, ()):
            split[part(key, rows)] = info.rows(*rows)
        if not parts.get(key):
            split[key] = info
    return split


def check_belongs(kept: Tensor, stored: Tensor, name: str, state: "Source") -> None:
    """Refuse a tensor of the state beside a model unless the model has it, rounded to its dtype."""
    if not torch.equal(kept.to(stored.dtype), stored):
        raise ValueError(
            f"'{state.name}' does not belong to the weights beside it: '{name}' differs; remove it "
            "if the weights are right"
        )


def format_names(names: Iterable[str | Path]) -> str:
    """Return the first names in quotes, and how many more there are."""
    all_names = list(names)
    text = ", ".join(f"'{name}'" for name in all_names[:4])
    if len(all_names) > 4:
        text += f" and {len(all_names) - 4} more"
    return text
