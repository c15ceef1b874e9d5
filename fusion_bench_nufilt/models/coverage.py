"""How much of a model is merged, and what is left out."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from fusion_bench_nufilt.methods.options import TargetConfig
from fusion_bench_nufilt.models.names import in_module_of_block, without_numbers
from fusion_bench_nufilt.models.views import MatrixView, looks_like_matrix

_REST = {
    "pretrained": "kept as the pretrained model has them",
    "first": "kept as the first task has them",
    "mean": "averaged",
}


@dataclass(frozen=True)
class Coverage:
    """Counts of parameters, and shares of the model's elements (0 to 1), by what happens to
    them.
    """

    layers: int  # number of matrices that are merged
    merged: tuple[int, float]  # number of parameters, and share of elements
    others: tuple[int, float]
    # Share of the elements in numbered blocks; None if there are no such blocks.
    merged_share_of_blocks: float | None
    # Names (with * for numbers) of matrices in blocks that are not merged, and their counts.
    left_out: dict[str, int]
    targets: TargetConfig

    def __str__(self) -> str:
        parameters, share = self.merged
        text = (
            f"merging {self.layers} layers in {parameters} parameters, {share:.1%} of all elements"
        )
        if self.merged_share_of_blocks is not None:
            text += f" and {self.merged_share_of_blocks:.1%} of those in blocks"
        text += (
            f"; {self.others[0]} other parameters ({1 - share:.1%}) are "
            f"{_REST[self.targets.other_params]}"
        )
        if self.left_out:
            text += f"; matrices in blocks that are not merged: {self.names_left_out}"
        return text

    @property
    def names_left_out(self) -> str:
        """The names in ``left_out``, with counts above one in brackets."""
        names = []
        for name, count in self.left_out.items():
            names.append(f"{name} ({count})" if count > 1 else name)
        return ", ".join(names)

    @property
    def warning(self) -> str | None:
        """The warning that ``auto`` merges less than half of the blocks, where it does."""
        share = self.merged_share_of_blocks
        if self.targets.target_modules != "auto" or share is None or share >= 0.5:
            return None
        return (
            f"target_modules=auto merges only {share:.1%} of the elements in blocks; the rest is "
            f"{_REST[self.targets.other_params]}. Name the layers in target_modules, or say "
            "all-linear, to merge more"
        )

    def as_dict(self) -> dict[str, object]:
        """Return the counts and shares as a JSON file has them."""
        shares = {"merged": self.merged, "averaged": (0, 0.0), "kept": (0, 0.0)}
        if self.targets.other_params == "mean":
            shares["averaged"] = self.others
        else:
            shares["kept"] = self.others
        content: dict[str, object] = {"layers": self.layers}
        for name, (count, share) in shares.items():
            content[name] = {"parameters": count, "share": share}
        content["merged_share_of_blocks"] = self.merged_share_of_blocks
        content["left_out"] = self.left_out
        return content


def coverage(model: nn.Module, layers: Mapping[str, MatrixView], targets: TargetConfig) -> Coverage:
    """Return what a merge of ``layers`` covers of a model, whose parameters may be on the meta
    device.
    """
    merged: Counter[int] = Counter()  # merged elements by the identity of their parameter
    for view in layers.values():
        merged[id(model.get_parameter(view.key))] += math.prod(view.shape)
    # A shared parameter comes once, under its first name.
    parameters = dict(model.named_parameters())
    in_blocks = list(filter(in_module_of_block, parameters))
    left_out: Counter[str] = Counter()
    for key in in_blocks:
        name, _, attribute = key.rpartition(".")
        parameter = parameters[key]
        is_matrix = looks_like_matrix(model.get_submodule(name), attribute, parameter)
        # Of a parameter that holds several layers, some may be merged and others not.
        if is_matrix and merged[id(parameter)] < parameter.numel():
            left_out[without_numbers(key)] += 1
    count = sum(elements > 0 for elements in merged.values())
    share = merged.total() / sum(parameter.numel() for parameter in parameters.values())
    share_of_blocks = None
    elements_in_blocks = sum(parameters[key].numel() for key in in_blocks)
    if elements_in_blocks:
        merged_in_blocks = sum(merged[id(parameters[key])] for key in in_blocks)
        share_of_blocks = merged_in_blocks / elements_in_blocks
    others = (len(parameters) - count, 1 - share)
    return Coverage(len(layers), (count, share), others, share_of_blocks, dict(left_out), targets)
