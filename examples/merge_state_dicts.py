"""Merge plain state dicts, one model after another, with nothing but torch and safetensors.

    python examples/merge_state_dicts.py base.safetensors first.safetensors second.safetensors --out merged.safetensors

Every matrix whose key contains one of ``--layers`` is merged; everything else stays the base's.
"""

import argparse
from pathlib import Path

from safetensors.torch import load_file, save_file

from fusion_bench_nufilt import FusionConfig, fuse_layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("tasks", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", nargs="+", default=["attn", "fc1"])
    arguments = parser.parse_args()

    base = load_file(arguments.base)
    keys = [key for key, w in base.items() if w.ndim == 2 and any(part in key for part in arguments.layers)]
    if not keys:
        parser.error(f"no matrix of {arguments.base} has one of {arguments.layers} in its key")
    pretrained = {key: base[key] for key in keys}
    merged = pretrained
    for step, path in enumerate(arguments.tasks, 1):
        weights = load_file(path)
        task = {key: weights[key] for key in keys if key in weights}
        merged, reports = fuse_layers(pretrained, merged, task, FusionConfig(), step=step)
        filtered = sum(report.filtered_share for report in reports.values()) / len(reports)
        print(f"{path.name}: {len(keys)} layers merged, {filtered:.0%} of the task vector filtered away on average")
    save_file({**base, **merged}, arguments.out)


if __name__ == "__main__":
    main()
