"""Merge the weights in plain safetensors files, one model after another, without the models' code.

    python examples/merge_state_dicts.py base/model.safetensors math/model.safetensors \\
        code/model.safetensors --out merged.safetensors

The layers are those of ``target_modules=auto``, found by the names of the tensors; everything else
stays as it is.
"""

import argparse
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from fusion_bench_nufilt import FusionConfig, fuse_layers
from fusion_bench_nufilt.models import select_layers
from fusion_bench_nufilt.models.architecture import from_names
from fusion_bench_nufilt.utils.tensors import TensorFile


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=Path)
    parser.add_argument("tasks", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--target-modules", default="auto", help="auto, all-linear or a regular expression"
    )
    arguments = parser.parse_args()
    if missing := [path for path in (arguments.base, *arguments.tasks) if not path.is_file()]:
        parser.error(f"{missing[0]} is not a file")

    model = from_names(TensorFile(arguments.base).tensors)  # its modules, without values
    layers = select_layers(model, arguments.target_modules)

    def matrices(state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the layers of a state dict, which share its memory; a tensor may hold several."""
        return {
            name: view.matrix(state[view.key][slice(*view.rows)]) for name, view in layers.items()
        }

    result, keys = load_file(arguments.base), {view.key for view in layers.values()}
    share = sum(result[key].numel() for key in keys) / sum(
        tensor.numel() for tensor in result.values()
    )
    print(
        f"merging {len(layers)} layers in {len(keys)} parameters, {share:.1%} of all elements; the "
        "rest is the base's"
    )
    pretrained = {name: matrix.clone() for name, matrix in matrices(result).items()}
    merged = pretrained
    for step, path in enumerate(arguments.tasks, 1):
        weights, name = load_file(path), path.absolute().parent.name
        if lacking := [view.key for view in layers.values() if view.key not in weights]:
            parser.error(f"{path} lacks {lacking[0]}, one of {len(lacking)} layers to merge")
        merged, reports = fuse_layers(
            pretrained, merged, matrices(weights), FusionConfig(), step=step
        )
        filtered = sum(report.filtered_share for report in reports.values()) / len(reports)
        print(
            f"{name}: {len(layers)} layers merged, {filtered:.0%} of the task vector filtered away "
            "on average"
        )
    for name, matrix in matrices(result).items():
        matrix.copy_(merged[name])
    save_file(result, arguments.out)


if __name__ == "__main__":
    main()
