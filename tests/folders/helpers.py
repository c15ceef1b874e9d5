"""Folders of tiny checkpoints, and how they are merged and compared."""

import hashlib
import json

import torch
from safetensors.torch import load_file, save_file

from fusion_bench_nufilt.core.options import split_options
from fusion_bench_nufilt.folders import Settings, merge_folders, plan_merge
from fusion_bench_nufilt.layers import TargetConfig
from fusion_bench_nufilt.methods import METHODS
from tests.models import finetuned

RANKS = {"null_rank": 6, "lora_rank": 4, "task_rank": 3, "max_steps": 5}
SHARDED = "20KB"


def save_stream(folder, base, tasks=3, dtype=torch.float32, shards=SHARDED):
    """Folders `base`, `task1`, `task2`, ...; the tasks in one file each, so that files do not correspond."""
    base = base.to(dtype)
    base.save_pretrained(folder / "base", max_shard_size=shards)
    models = {"_pretrained_": base}
    for i in range(1, tasks + 1):
        models[f"task{i}"] = finetuned(base, seed=i, scale=0.002)
        models[f"task{i}"].save_pretrained(folder / f"task{i}")
    return models


def configs(options, method="nufilt"):
    """The method's options and the targets, from options of either."""
    kind = METHODS[method]
    (config, targets), left = split_options([kind.Options, TargetConfig], {**kind.targets, **options})
    assert not left, left
    return config, targets


def plan(folder, tasks=("task1", "task2", "task3"), merged=None, settings=None, method="nufilt", **options):
    """Plan a merge of tasks by the names of their folders, with options of the method and of the targets."""
    options = {**RANKS, **options} if method == "nufilt" else options
    return plan_merge(
        str(folder / "base"),
        [str(folder / task) for task in tasks],
        None if merged is None else str(folder / merged),
        *configs(options, method),
        settings if isinstance(settings, Settings) else Settings(**(settings or {})),
        method=method,
    )


def merge(folder, tasks=("task1", "task2", "task3"), out="out", merged=None, **options):
    """Merge tasks by the names of their folders, with the options of :func:`plan`."""
    return merge_folders(plan(folder, tasks, merged, **options), folder / out)


def tensors(folder):
    """All tensors of a folder's weight files."""
    return {key: value for path in sorted(folder.glob("*.safetensors")) for key, value in load_file(path).items()}


def same(state, other):
    """Same keys, dtypes and bits."""
    return state.keys() == other.keys() and all(
        value.dtype == other[key].dtype and torch.equal(value, other[key]) for key, value in state.items()
    )


def hashes(folder):
    """Digest of every file; of the manifest without the seconds, which no two runs share."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if path.name == "nufilt.json":
            content = json.loads(data)
            for reports in content["layers"].values():
                for report in reports:
                    for key in {"seconds", "solving_seconds"} & report.keys():
                        del report[key]
            data = json.dumps(content).encode()
        found[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return found


def change(folder, key, function):
    """Rewrite one tensor of a folder; None removes it."""
    for path in folder.glob("*.safetensors"):
        state = load_file(path)
        if key in state:
            value = function(state.pop(key))
            if value is not None:
                state[key] = value
            save_file(state, path, metadata={"format": "pt"})
            return
    raise KeyError(key)
