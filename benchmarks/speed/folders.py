"""Measure time, memory and traffic of `nufilt merge` on synthetic checkpoints of full size.

    python benchmarks/speed/folders.py --size 1B --size 7B --folder /a/disk/with/room

Makes a base, a merged model and a task in bfloat16 (a 7B takes 42 GB, and 14 GB for the result),
merges the task as step 2 in a process of its own, and prints a row of a table. The updates have a
decaying spectrum and the rounding of bfloat16, as fine-tuned models have: the time of the singular
subspaces depends on it.

    python benchmarks/speed/folders.py --size 7B --blocks 1 --stream two --no-state \\
        --again="--method best"

merges both models at once, and `--stream adapters` eight LoRA adapters of rank 16.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

# The rest of CLIP ViT-L/14-336 and of Llama-2-7B are the defaults of these classes.
TOWER = CLIPVisionConfig(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=24,
    num_attention_heads=16,
    image_size=336,
    patch_size=14,
)
SIZES = {
    "tiny": LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=99,
    ),
    "0.1B": LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12
    ),
    "0.3B": LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16
    ),
    "1B": LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32
    ),
    "3B": LlamaConfig(
        hidden_size=3200, intermediate_size=8640, num_hidden_layers=26, num_attention_heads=32
    ),
    "7B": LlamaConfig(),
    "LLaVA-7B": LlavaConfig(vision_config=TOWER, text_config=LlamaConfig(vocab_size=32064)),
}
MERGED_LAYER = re.compile(r"(?!.*vision).*layers\.\d+\..*proj\.weight")
SHARD_BYTES = 5 * 10**9
CHANGE = 0.01  # ratio of the norms of update and weight
RANK = 512  # of an update
DECAY = -0.7  # exponent by which its singular values fall


def make_checkpoints(config, folder, device="cpu", names=("base", "merged", "task")):
    """Write the folders `base`, `merged` (one task) and `task`, or some of them, tensor by tensor,
    with values drawn on a device.
    """
    kind = LlamaForCausalLM
    if isinstance(config, LlavaConfig):
        kind = LlavaForConditionalGeneration
    with torch.device("meta"):
        model = kind._from_config(config)
    config.architectures = [kind.__name__]
    config.dtype = "bfloat16"
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    shards = [{}]
    size = 0
    parameters = 0
    merged_layers = 0
    for key, shape in shapes.items():
        if size > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][key] = shape
        numel = torch.Size(shape).numel()
        size += 2 * numel
        parameters += numel
        if MERGED_LAYER.fullmatch(key):
            merged_layers += 1
    files_of_shards = []
    for number in range(1, len(shards) + 1):
        files_of_shards.append(f"model-{number:05}-of-{len(shards):05}.safetensors")
    weight_map = {}
    for name, shard in zip(files_of_shards, shards, strict=True):
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {}, "weight_map": weight_map}
    folders = [folder / name for name in names]
    for path in folders:
        path.mkdir(parents=True)
        config.save_pretrained(path)
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    if "merged" in names:
        manifest = {"step": 1, "tasks": ["synthetic"]}
        (folder / "merged" / "nufilt.json").write_text(json.dumps(manifest))
    generator = torch.Generator(device).manual_seed(0)
    for name, shard in zip(files_of_shards, shards, strict=True):
        with ExitStack() as stack:
            files = [stack.enter_context(open(path / name, "wb")) for path in folders]
            for file in files:
                file.write(header(shard))
            for key, shape in shard.items():
                base = torch.randn(shape, generator=generator, device=device).mul_(0.02)
                for path, file in zip(folders, files, strict=True):
                    value = base
                    if path.name != "base" and MERGED_LAYER.fullmatch(key):
                        value = base + update(shape, generator)
                    file.write(value.bfloat16().cpu().view(torch.uint8).numpy().data)
    return parameters, merged_layers


def header(shapes):
    content = {"__metadata__": {"format": "pt"}}
    start = 0
    for key, shape in shapes.items():
        stop = start + 2 * torch.Size(shape).numel()
        content[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text


def update(shape, generator):
    """Return a random matrix with singular values of about k ** DECAY, and CHANGE times a weight's
    norm.
    """
    d_o, d_i = shape
    device = generator.device
    rank = min(RANK, d_o, d_i)
    sigma = torch.arange(1, rank + 1.0, device=device) ** DECAY
    left = torch.randn(d_o, rank, generator=generator, device=device)
    right = torch.randn(rank, d_i, generator=generator, device=device)
    value = left * sigma @ right
    norm = CHANGE * 0.02 * (d_o * d_i) ** 0.5  # a weight's entries have a deviation of 0.02
    return value * (norm / value.norm())


def make_adapters(folder, count=8, rank=16):
    """Write LoRA adapters of all merged layers of the base in a folder, and return their
    folders.
    """
    index = json.loads((folder / "base" / "model.safetensors.index.json").read_text())
    generator = torch.Generator().manual_seed(1)
    adapters = [{} for _ in range(count)]
    for key, file in index["weight_map"].items():
        if MERGED_LAYER.fullmatch(key):
            with safe_open(folder / "base" / file, "pt") as base:
                d_o, d_i = base.get_slice(key).get_shape()
            name = f"base_model.model.{key.removesuffix('.weight')}.lora"
            for adapter in adapters:
                A = torch.randn(rank, d_i, generator=generator) * d_i**-0.5
                B = torch.randn(d_o, rank, generator=generator) * 0.01
                adapter[f"{name}_A.weight"] = A
                adapter[f"{name}_B.weight"] = B
    folders = [folder / f"adapter{i}" for i in range(count)]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    for path, adapter in zip(folders, adapters, strict=True):
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps(settings))
        save_file(adapter, path / "adapter_model.safetensors")
    return folders


def models_of(stream, folder):
    """Return the words of `nufilt merge` that name the models of a stream."""
    words = ["--base", str(folder / "base")]
    if stream == "next":
        # Its manifest lists no files that could be verified.
        words += ["--merged", str(folder / "merged"), "--no-verify"]
        tasks = [folder / "task"]
    elif stream == "two":
        tasks = [folder / "merged", folder / "task"]
    else:
        tasks = make_adapters(folder)
    for task in tasks:
        words += ["--task", str(task)]
    return words


def measure(words):
    """Run `nufilt merge` with some words in a separate process: elapsed and CPU seconds, peak
    memory, traffic.
    """
    code = (
        "import json, pathlib, resource, sys, time\n"
        "from fusion_bench_nufilt.cli.app import app\n"
        "try: app(sys.argv[1:])\n"
        "finally:\n"
        "    import torch\n"
        "    io = pathlib.Path('/proc/self/io')\n"
        "    io = dict(line.split(': ') for line in io.read_text().splitlines()) if io.exists() "
        "else {}\n"
        "    status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "    rss = status.get('VmHWM', str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))\n"
        "    memory = {'rss': int(rss.split()[0]) * 1024, 'gpu': "
        "torch.cuda.max_memory_allocated()}\n"
        "    traffic = {'read': int(io.get('rchar', 0)), 'written': int(io.get('wchar', 0))}\n"
        "    print(json.dumps({'cpu': time.process_time(), **memory, **traffic}))\n"
    )
    command = [sys.executable, "-c", code, "merge", *words]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return {"seconds": seconds, **json.loads(done.stdout.splitlines()[-1])}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", action="append", choices=SIZES, help="default: 1B and 7B")
    parser.add_argument(
        "--blocks", type=int, help="at most so many, which leaves the peak of memory as it is"
    )
    parser.add_argument(
        "--again",
        action="append",
        default=[],
        metavar="WORDS",
        help="merge again with these settings",
    )
    parser.add_argument(
        "--stream", choices=["next", "two", "adapters"], default="next", help="what is merged"
    )
    parser.add_argument("--folder", type=Path, default=Path("outputs/folders"))
    parser.add_argument(
        "--keep", action="store_true", help="keep the checkpoints, and use those that are there"
    )
    arguments, options = parser.parse_known_args()
    header = (
        "size, parameters, layers, minutes, CPU minutes, peak RSS (GB), read (GB), written (GB)"
    )
    print(f"| {header.replace(', ', ' | ')} |")
    print("| --- " * 8 + "|")
    for size in arguments.size or ["1B", "7B"]:
        folder = arguments.folder / size
        if folder.exists() and not arguments.keep:
            parser.error(f"{folder} exists: remove it, or say --keep to use it")
        about = folder / "about.json"
        if not about.exists():
            about.parent.mkdir(parents=True, exist_ok=True)
            config = SIZES[size]
            title = size
            text_config = config.get_text_config()
            all_blocks = text_config.num_hidden_layers
            if arguments.blocks and arguments.blocks < all_blocks:
                text_config.num_hidden_layers = arguments.blocks
                title = f"{size}, {arguments.blocks} of {all_blocks} blocks"
            about.write_text(json.dumps([title, *make_checkpoints(config, folder)]))
        title, parameters, layers = json.loads(about.read_text())
        try:
            for words in (), *map(str.split, arguments.again):
                shutil.rmtree(folder / "out", ignore_errors=True)
                models = models_of(arguments.stream, folder)
                result = measure([*models, "--out", str(folder / "out"), *options, *words])
                row = [", ".join([title, *words]), f"{parameters / 1e9:.2f}B", str(layers)]
                row += [f"{result[key] / 60:.1f}" for key in ("seconds", "cpu")]
                row += [f"{result[key] / 1e9:.2f}" for key in ("rss", "read", "written")]
                print("|", " | ".join(row), "|", flush=True)
        finally:
            if not arguments.keep:
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()
