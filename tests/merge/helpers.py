"""Folders of tiny checkpoints, and how they are merged and compared."""

import hashlib
import json
from copy import deepcopy

import pytest
import torch
from fusion_bench import BaseModelPool
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.merge import merge_folders, plan_merge
from fusion_bench_nufilt.merge.output import work_folder
from fusion_bench_nufilt.methods import METHODS
from fusion_bench_nufilt.methods.options import Settings, TargetConfig
from fusion_bench_nufilt.utils.options import split_options
from tests.tiny_models import finetuned

RANKS = {"null_rank": 6, "lora_rank": 4, "task_rank": 3, "max_steps": 5}
SHARDED = "20KB"
STATE = "nufilt_state/model.safetensors"


def save_stream(folder, base, tasks=3, dtype=torch.float32, shards=SHARDED):
    """Folders `base`, `task1`, `task2`, ...; the tasks in one file each, so that files do not
    correspond.
    """
    base = base.to(dtype)
    base.save_pretrained(folder / "base", max_shard_size=shards)
    models = {"_pretrained_": base}
    for i in range(1, tasks + 1):
        models[f"task{i}"] = finetuned(base, seed=i, scale=0.002)
        models[f"task{i}"].save_pretrained(folder / f"task{i}")
    return models


def save_merged_adapters(folder):
    """A base in bfloat16, and two tasks with an adapter of rank 2 merged into it: `task1` and
    `task2` in bfloat16, `wide1` and `wide2` in float32.
    """
    size = {"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 50}
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=2)).bfloat16()
    base.save_pretrained(folder / "base")
    for number in (1, 2):
        task = deepcopy(base).float()
        for name, weight in task.named_parameters():
            if "proj" in name:
                weight.data += 1e-3 * torch.randn(96, 2) @ torch.randn(2, 96)
        task.save_pretrained(folder / f"wide{number}")
        task.bfloat16().save_pretrained(folder / f"task{number}")


def algorithm(models, **options):
    """The model that the algorithm makes of loaded models."""
    options = {**RANKS, "shuffle_order": False, **options}
    return NufiltContinualMergingAlgorithm(**options).run(models)


def pool(folder, kind, dtype=torch.float32, **names):
    """A pool of models of a class in folders, by their names in the pool."""
    models = {}
    for model, name in names.items():
        models[model] = {
            "_target_": f"transformers.{kind.__name__}.from_pretrained",
            "pretrained_model_name_or_path": str(folder / name),
            "dtype": str(dtype).removeprefix("torch."),
        }
    return BaseModelPool(OmegaConf.create(models))


def plan(
    folder,
    tasks=("task1", "task2", "task3"),
    merged=None,
    settings=None,
    method="nufilt",
    base=None,
    **options,
):
    """Plan a merge of tasks by the names of their folders, with options of the method and of the
    targets; by default, the base is the folder `base`, and for an adapter none is given.
    """
    kind = METHODS[method]
    defaults = dict(kind.defaults)
    if method == "nufilt":
        defaults |= RANKS
    (config, targets), left = split_options([kind.Options, TargetConfig], {**defaults, **options})
    assert not left, left
    task_folders = [str(folder / name) for name in tasks]
    if merged is not None:
        merged = str(folder / merged)
    settings = Settings(**(settings or {}))
    if base is None and not settings.adapter:
        base = "base"
    base_name = None if base is None else str(folder / base)
    return plan_merge(base_name, task_folders, merged, config, targets, settings, method=method)


def interrupt(folder, after=8, out="out", **options):
    """Leave a merge that stopped after some tensors; returns how many are in its journal."""

    def stop(done, total):
        if done >= after:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        merge_folders(plan(folder, **options), folder / out, stop)
    assert not (folder / out).exists()
    return len((work_folder(folder / out) / "journal.jsonl").read_text().splitlines()) - 1


def merge(folder, tasks=("task1", "task2", "task3"), out="out", merged=None, **options):
    """Merge tasks by the names of their folders, with the options of :func:`plan`."""
    return merge_folders(plan(folder, tasks, merged, **options), folder / out)


def tensors(folder):
    """All tensors of a folder's weight files."""
    state = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= load_file(path)
    return state


def manifest(folder):
    return json.loads((folder / "nufilt.json").read_text())


def change_json(path, **fields):
    """Set some fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def same(state, other):
    """Same keys, dtypes and bits."""
    if state.keys() != other.keys():
        return False
    for key, value in state.items():
        if value.dtype != other[key].dtype or not torch.equal(value, other[key]):
            return False
    return True


def without_seconds(content):
    """A manifest without the seconds that its layers took and the times of its inputs, which two
    runs need not share.
    """
    for reports in content["layers"].values():
        for report in reports:
            report.pop("seconds", None)
            report.pop("solving_seconds", None)
    for model in (*content["inputs"].values(), *content["task_inputs"]):
        model.pop("stamps", None)
    return content


def hashes(folder):
    """Digest of every file; of the manifest without the seconds."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        data = path.read_bytes()
        if path.name == "nufilt.json":
            data = json.dumps(without_seconds(json.loads(data))).encode()
        digests[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return digests


def never(*args, **options):
    """Stands in for a function that a test says is not called."""
    raise AssertionError("this is not to be called")


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


def rewrite(folder, function):
    """Store what a function makes of the tensors of each weight file."""
    for path in folder.glob("*.safetensors"):
        save_file(function(load_file(path)), path, metadata={"format": "pt"})


def rename(folder, function):
    """Give all tensors of a folder other names."""
    rewrite(folder, lambda state: {function(key): value for key, value in state.items()})
    for index in folder.glob("*.index.json"):
        weight_map = json.loads(index.read_text())["weight_map"]
        change_json(index, weight_map={function(key): file for key, file in weight_map.items()})


def transpose_experts(folder):
    """Store the fused experts of a folder with one weight file transposed, as those of Qwen3-VL-MoE
    were released.
    """
    (path,) = folder.glob("*.safetensors")
    stored = load_file(path)
    for key, value in stored.items():
        if ".experts." in key:
            stored[key] = value.mT.contiguous()
    save_file(stored, path, metadata={"format": "pt"})
