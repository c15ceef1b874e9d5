"""How much of a model is merged, and what is not."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from fusion_bench_nufilt.layers.targets import TargetConfig
from fusion_bench_nufilt.layers.views import View, join, looks_like_matrix

_REST = {
    "pretrained": "kept as the pretrained model has them",
    "first": "kept as the first task has them",
    "mean": "averaged",
}

_FATES = ("merged", "averaged", "kept")


@dataclass(frozen=True)
class Coverage:
    """Parameters by what happens to them; shares are of the model's elements, from 0 to 1."""

    layers: int  # matrices that are merged
    merged: tuple[int, float]  # number of parameters, and share of elements
    averaged: tuple[int, float]
    kept: tuple[int, float]
    merged_share_of_blocks: float | None  # of the elements in numbered blocks; None: there are no such blocks
    left_out: dict[str, int]  # what looks like a matrix in a block and is not merged: name with *, how often
    warning: str | None
    rest: str  # what happens to all that is not merged, in words

    def __str__(self) -> str:
        parameters, share = self.merged
        others = self.averaged[0] + self.kept[0]
        text = f"merging {self.layers} layers in {parameters} parameters, {share:.1%} of all elements"
        if self.merged_share_of_blocks is not None:
            text += f" and {self.merged_share_of_blocks:.1%} of those in blocks"
        text += f"; {others} other parameters ({1 - share:.1%}) are {self.rest}"
        if self.left_out:
            text += f"; matrices in blocks that are not merged: {self.names_left_out}"
        return text

    @property
    def names_left_out(self) -> str:
        return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in self.left_out.items())

    def as_dict(self) -> dict[str, object]:
        """For a JSON file."""
        shares = {key: dict(zip(("parameters", "share"), getattr(self, key), strict=True)) for key in _FATES}
        return {
            "layers": self.layers,
            **shares,
            "merged_share_of_blocks": self.merged_share_of_blocks,
            "left_out": self.left_out,
        }


def coverage(model: nn.Module, layers: Mapping[str, View], targets: TargetConfig) -> Coverage:
    """What a merge of ``layers`` covers of a model, whose parameters may be on the meta device."""
    in_layers: Counter[int] = Counter()  # elements by the identity of their parameter
    for view in layers.values():
        in_layers[id(model.get_parameter(view.key))] += view.shape[0] * view.shape[1]
    seen: set[int] = set()
    total = blocks = merged = merged_in_blocks = 0
    left_out: Counter[str] = Counter()
    for name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            done, size = in_layers[id(parameter)], parameter.numel()
            total, merged = total + size, merged + done
            if re.fullmatch(r"(.*\.)?\d+\..*", name):
                blocks, merged_in_blocks = blocks + size, merged_in_blocks + done
                if done < size and looks_like_matrix(module, attribute, parameter):
                    left_out[re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", join(name, attribute))] += 1
    share, count = merged / total, sum(1 for elements in in_layers.values() if elements)
    rest, nothing = (len(seen) - count, 1 - share), (0, 0.0)
    averages = targets.other_params == "mean"
    of_blocks = merged_in_blocks / blocks if blocks else None
    return Coverage(
        layers=len(layers),
        merged=(count, share),
        averaged=rest if averages else nothing,
        kept=nothing if averages else rest,
        merged_share_of_blocks=of_blocks,
        left_out=dict(left_out),
        warning=_warning(targets, of_blocks),
        rest=_REST[targets.other_params],
    )


def _warning(targets: TargetConfig, of_blocks: float | None) -> str | None:
    if targets.target_modules != "auto" or of_blocks is None or of_blocks >= 0.5:
        return None
    return f"target_modules=auto merges only {of_blocks:.1%} of the elements in blocks; the rest is " + (
        _REST[targets.other_params] + ". Name the layers in target_modules, or say all-linear, to merge more"
    )
