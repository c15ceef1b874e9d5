"""Models in memory as the sources of a merge."""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_nufilt.utils.tensors import describe, is_finite

from .source import Parts, Source, part


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
        self.name = self.label = name
        self.config = config or {}
        self.whole = self.tensors = {key: describe(value) for key, value in tensors.items()}
        self._whole = self._values = tensors

    def split(self, parts: Mapping[str, Parts]) -> None:
        super().split(parts)
        if not parts:
            return
        values: dict[str, Tensor] = {}
        for key, value in self._whole.items():
            for rows in parts.get(key, ()):
                # A view, so that what is written to a part is written to the model.
                values[part(key, rows)] = value[slice(*rows)]
            if not parts.get(key):
                values[key] = value
        self._values = values

    def read(self, key: str, device: torch.device | str = "cpu") -> tuple[Tensor, str]:
        """Return a tensor, which shares the model's memory on its own device, and no digest."""
        value = self._values[key]
        if not is_finite(value):
            raise ValueError(f"model '{self.name}', tensor '{key}' has NaN or infinite values")
        return value.to(device), ""

    def elements(self, key: str, start: int, stop: int) -> Tensor:
        return self._values[key].flatten()[start:stop]

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

    def write(self, key: str, value: Tensor) -> None:
        self._values[key].copy_(value)

    def check_floats(self, keys: Iterable[str]) -> None:
        """Check the values as well, which are at hand: they must be finite."""
        all_keys = list(keys)
        super().check_floats(all_keys)
        for key in all_keys:
            self.read(key, self._values[key].device)


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
    """Return the labels and class of a transformers or timm model, in the form of its
    config.json.
    """
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    # A loaded config still names the class that was saved, which may be another than this one.
    if callable(to_json):
        return {**json.loads(to_json()), "architectures": [type(model).__name__]}
    of_timm = getattr(model, "pretrained_cfg", None) or {}
    if "architecture" not in of_timm:
        return {}
    return {
        "architecture": of_timm["architecture"],
        "num_classes": getattr(model, "num_classes", 0),
        "pretrained_cfg": {"classifier": of_timm.get("classifier")},
    }
