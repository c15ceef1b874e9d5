"""Where a merge reads a model's tensors.

A :class:`Source` maps keys to tensors that are read one by one. The files of a checkpoint are one
(``checkpoint.py``), a model in memory is another.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_nufilt.utils.tensors import (
    CHUNK_BYTES,
    FLOATS,
    TensorFile,
    TensorInfo,
    describe,
    in_dtype,
    is_finite,
)

RowRanges = Sequence[tuple[int, int]]  # where the rows of each layer in a tensor start and stop

# What training wraps a model or its layers in, by the name that this adds to those of tensors.
# That of DistributedDataParallel and of DeepSpeed is "module", at the start of a name.
_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}


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
    row_ranges: Mapping[str, RowRanges] = {}  # of the tensors that are split
    opened: Mapping[str, TensorFile] = {}  # the files that are read
    remote = False  # whether the weights are still on the hub
    in_memory = False
    is_absent = False  # whether no weight can be read: it is the base of a merge of adapters

    @property
    def unread_weights(self) -> Sequence[str]:
        """The files of weights beside those that are read."""
        return ()

    @abstractmethod
    def read(self, key: str, device: torch.device | str = "cpu") -> Tensor:
        """Read a tensor, whose values must be finite, to a device."""

    @abstractmethod
    def elements(self, key: str, start: int, stop: int) -> Tensor:
        """Read the elements ``start`` to ``stop`` of a flattened tensor."""

    def device(self, key: str) -> torch.device:
        """Return the device on which a tensor is read as it is."""
        return torch.device("cpu")

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
            # The layers of a model in memory may lie on several devices.
            if not torch.equal(values, other_values.to(values.device)):
                return False
        return True

    def split(self, row_ranges: Mapping[str, RowRanges]) -> None:
        """Make groups of rows of some tensors tensors of their own, under the keys that
        :func:`rows_key` gives them.
        """
        self.row_ranges = row_ranges
        self.tensors = split_rows(self.whole, row_ranges)

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
                f"model '{self.name}' has {len(empty)} empty tensors: {format_names(empty)}. "
                "DeepSpeed ZeRO-3 leaves these where a model is saved without its gathered "
                "weights: save it again with save_pretrained(FOLDER, "
                "state_dict=accelerator.get_state_dict(model))"
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

    def check_finite(self, name: str, value: Tensor) -> None:
        """Raise a ValueError that names a tensor, of which this is the value, if it is not
        finite.
        """
        if not is_finite(value):
            raise ValueError(f"model '{self.name}', tensor '{name}' has NaN or infinite values")


def rows_key(key: str, rows: tuple[int, int]) -> str:
    """Return the key of a group of rows as a tensor of its own."""
    return f"{key}[{rows[0]}:{rows[1]}]"


def split_rows(
    tensors: Mapping[str, TensorInfo], row_ranges: Mapping[str, RowRanges]
) -> dict[str, TensorInfo]:
    """Return the tensors; those in ``row_ranges`` are replaced by their groups of rows, under the
    keys of :func:`rows_key`.
    """
    split: dict[str, TensorInfo] = {}
    for key, info in tensors.items():
        for rows in row_ranges.get(key, ()):
            split[rows_key(key, rows)] = info.rows(*rows)
        if not row_ranges.get(key):
            split[key] = info
    return split


class MemorySource(Source):
    """Tensors in memory, which are read where they are, and which a merge may write.

    Args:
        name: the user's name for the model.
        tensors: by key; neither they nor the mapping are copied, so that one can be replaced once
            it was read.
        config: the content that the model's config.json has.
    """

    in_memory = True

    def __init__(
        self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None = None
    ) -> None:
        self.name = name
        self.label = name
        self.config = config or {}
        self.whole = {key: describe(value) for key, value in tensors.items()}
        self.tensors = self.whole
        self._values = tensors

    def split(self, row_ranges: Mapping[str, RowRanges]) -> None:
        super().split(row_ranges)
        if not row_ranges:
            return
        values = dict(self._values)
        for key, ranges_of_tensor in row_ranges.items():
            for rows in ranges_of_tensor:
                # A view, so that what is written to a part is written to the model.
                values[rows_key(key, rows)] = values[key][slice(*rows)]
        self._values = values

    def read(self, key: str, device: torch.device | str = "cpu") -> Tensor:
        """Return a tensor, which shares the model's memory on its own device."""
        value = self._values[key]
        self.check_finite(key, value)
        return value.to(device)

    def device(self, key: str) -> torch.device:
        return self._values[key].device

    def elements(self, key: str, start: int, stop: int) -> Tensor:
        return self._values[key].flatten()[start:stop]

    def write(self, key: str, value: Tensor) -> None:
        """Replace the values of a tensor, whose dtype must hold the new ones."""
        target = self._values[key]
        target.copy_(in_dtype(key, value, target.dtype))

    def same(self, key: str, other: str) -> bool:
        """Tell whether two tensors hold the same values, at once where they share their memory."""
        value = self._values[key]
        other_value = self._values[other]
        # A transpose begins at the same address and has other values in its places.
        is_same_memory = (
            value.data_ptr() == other_value.data_ptr()
            and value.stride() == other_value.stride()
            and value.shape == other_value.shape
        )
        return is_same_memory or super().same(key, other)

    def check_floats(self, keys: Iterable[str]) -> None:
        """Check the values as well, which are at hand: they must be finite."""
        all_keys = list(keys)
        super().check_floats(all_keys)
        for key in all_keys:
            self.check_finite(key, self._values[key])


def module_source(name: str, model: nn.Module, without: Collection[str] = ()) -> MemorySource:
    """Return the source of a model's parameters and buffers, but those that were drawn at random
    for lack of others.
    """
    tensors = {}
    for key, value in model.state_dict().items():
        if isinstance(value, Tensor) and key not in without:
            tensors[key] = value
    return MemorySource(name, tensors, config_of(model))


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return the configuration of a transformers model, in the form of its config.json; empty for
    any other.
    """
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if not callable(to_json):
        return {}
    # A loaded config still names the class that was saved, which may be another than this one.
    return {**json.loads(to_json()), "architectures": [type(model).__name__]}


def check_belongs(kept: Tensor, stored: Tensor, name: str, state: Source) -> None:
    """Refuse a tensor of the state beside a model unless the model has it, rounded to a shorter
    dtype: a state of other weights is told by that.
    """
    is_rounded = stored.dtype.itemsize < kept.dtype.itemsize
    if is_rounded and not torch.equal(kept.to(stored.dtype), stored):
        raise ValueError(
            f"'{state.name}' does not belong to the weights beside it: '{name}' differs; remove it "
            "if the weights are right"
        )


def program_on_page(anchor: str) -> str:
    """Return where a program is that rewrites a user's files, as a message says it."""
    return f"the program at docs/troubleshooting.md#{anchor}"


def format_names(names: Iterable[str | Path]) -> str:
    """Return the first names in quotes, and how many more there are."""
    all_names = list(names)
    text = ", ".join(f"'{name}'" for name in all_names[:4])
    if len(all_names) > 4:
        text += f" and {len(all_names) - 4} more"
    return text
