"""The account of how much of a model is merged, and of what is not."""

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


@dataclass(frozen=True)
class Coverage:
    """Counts of parameters, and shares of the model's elements (0 to 1), by what happens to them."""

    layers: int  # number of matrices that are merged
    merged: tuple[int, float]  # number of parameters, and share of elements
    averaged: tuple[int, float]
    kept: tuple[int, float]
    merged_share_of_blocks: float | None  # share of the elements in numbered blocks; None if there are no such blocks
    left_out: dict[str, int]  # names (with * for numbers) of matrices in blocks that are not merged, and their counts
    warning: str | None
    rest: str  # what happens to everything that is not merged, in words

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
        """The names in ``left_out``, with counts above one in brackets."""
        return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in self.left_out.items())

    def as_dict(self) -> dict[str, object]:
        """Return what a JSON file says of it."""
        fates = {"merged": self.merged, "averaged": self.averaged, "kept": self.kept}
        counts = {fate: {"parameters": count, "share": share} for fate, (count, share) in fates.items()}
        return {
            "layers": self.layers,
            **counts,
            "merged_share_of_blocks": self.merged_share_of_blocks,
            "left_out": self.left_out,
        }


def coverage(model: nn.Module, layers: Mapping[str, View], targets: TargetConfig) -> Coverage:
    """Return what a merge of ``layers`` covers of a model, whose parameters may be on the meta device."""
    merged: Counter[int] = Counter()  # merged elements by the identity of their parameter
    for view in layers.values():
        merged[id(model.get_parameter(view.key))] += view.shape[0] * view.shape[1]
    sizes: dict[int, int] = {}  # elements of all parameters
    in_blocks: set[int] = set()  # parameters in numbered blocks
    left_out: Counter[str] = Counter()
    for name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if (key := id(parameter)) in sizes:  # A parameter that modules share counts where it comes first.
                continue
            sizes[key] = parameter.numel()
            if re.fullmatch(r"(.*\.)?\d+\..*", name):
                in_blocks.add(key)
                if merged[key] < sizes[key] and looks_like_matrix(module, attribute, parameter):
                    left_out[re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", join(name, attribute))] += 1
    count, share = sum(elements > 0 for elements in merged.values()), merged.total() / sum(sizes.values())
    rest = (len(sizes) - count, 1 - share)
    averages = targets.other_params == "mean"
    blocks = sum(sizes[key] for key in in_blocks)
    of_blocks = sum(merged[key] for key in in_blocks) / blocks if blocks else None
    return Coverage(
        layers=len(layers),
        merged=(count, share),
        averaged=rest if averages else (0, 0.0),
        kept=(0, 0.0) if averages else rest,
        merged_share_of_blocks=of_blocks,
        left_out=dict(left_out),
        warning=_warning(targets, of_blocks),
        rest=_REST[targets.other_params],
    )


def _warning(targets: TargetConfig, of_blocks: float | None) -> str | None:
    if targets.target_modules != "auto" or of_blocks is None or of_blocks >= 0.5:
        return None
    return (
        f"target_modules=auto merges only {of_blocks:.1%} of the elements in blocks; the rest is "
        f"{_REST[targets.other_params]}. Name the layers in target_modules, or say all-linear, to merge more"
    )
