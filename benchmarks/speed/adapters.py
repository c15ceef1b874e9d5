"""Measure time, memory and traffic of `nufilt merge --adapter` on LoRA adapters of full size.

    python benchmarks/speed/adapters.py --size 70B --folder /a/disk/with/room
    python benchmarks/speed/adapters.py --size 1B --base --count 2 --count 8

Writes adapters of rank 16 of all projections (three of a 70B take 2.5 GB), without a base, merges
them in a process of its own, and prints a row of a table. With `--base`, a base in bfloat16 is made
as well, into which they are merged. Words that are left over go to `nufilt merge`.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from folders import SIZES, make_checkpoints, measure
from safetensors.torch import save_file
from transformers import LlamaConfig

RANK = 16
SHAPES = {
    **SIZES,
    "70B": LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
}


def projections(config):
    """Yield the name of each projection in a Llama's blocks, with its outputs and inputs."""
    width = config.hidden_size
    keys = width // config.num_attention_heads * config.num_key_value_heads
    sides = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (config.intermediate_size, width),
        "mlp.up_proj": (config.intermediate_size, width),
        "mlp.down_proj": (width, config.intermediate_size),
    }
    for block in range(config.num_hidden_layers):
        for name, (d_o, d_i) in sides.items():
            yield f"model.layers.{block}.{name}", d_o, d_i


def make_adapter(folder, config, seed):
    """Write a random adapter, and return its folder; it names the base beside it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, d_o, d_i in projections(config):
        A = torch.randn(RANK, d_i, generator=generator) * d_i**-0.5
        B = torch.randn(d_o, RANK, generator=generator) * 0.01
        tensors[f"base_model.model.{name}.lora_A.weight"] = A
        tensors[f"base_model.model.{name}.lora_B.weight"] = B
    folder.mkdir(parents=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(folder.parent / "base"),
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": "all-linear",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SHAPES, default="70B")
    parser.add_argument("--count", type=int, action="append", help="of adapters; default: 3")
    parser.add_argument("--blocks", type=int, help="at most so many")
    parser.add_argument("--base", action="store_true", help="merge into a base, which is made")
    parser.add_argument("--folder", type=Path, default=Path("outputs/adapters"))
    arguments, options = parser.parse_known_args()
    config = SHAPES[arguments.size]
    config.num_hidden_layers = min(
        config.num_hidden_layers, arguments.blocks or config.num_hidden_layers
    )
    folder = arguments.folder / arguments.size
    if folder.exists():
        parser.error(f"{folder} exists: remove it")
    counts = arguments.count or [3]
    try:
        words = ["--adapter"]
        if arguments.base:
            make_checkpoints(config, folder, names=["base"])
            words = ["--base", str(folder / "base")]
        tasks = [make_adapter(folder / f"task{i}", config, i) for i in range(max(counts))]
        print("| adapters | seconds | CPU seconds | peak RSS (GB) | read (GB) | written (GB) |")
        print("| --- " * 6 + "|")
        for count in counts:
            named = [word for task in tasks[:count] for word in ("--task", str(task))]
            out = folder / "out"
            shutil.rmtree(out, ignore_errors=True)
            result = measure([*words, *named, "--out", str(out), *options])
            row = [str(count), f"{result['seconds']:.0f}", f"{result['cpu']:.0f}"]
            row += [f"{result[key] / 1e9:.2f}" for key in ("rss", "read", "written")]
            print("|", " | ".join(row), "|", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
