"""What `gpu.sh` runs: each part in a process of its own and within a limit, and one table of what
they measured.

A part writes rows as it measures them, so that one that fails or runs over leaves what it has.
"""

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import one_step
import pandas as pd
import torch

from fusion_bench_nufilt import fuse_layers

REPO = Path(__file__).resolve().parents[2]
COLUMNS = ("what", "method", "seconds", "GPU memory (GB)", "remark")


def add(args: argparse.Namespace, *row: object) -> None:
    """Append a row of COLUMNS to the file of rows."""
    with args.rows.open("a") as file:
        file.write(json.dumps(row) + "\n")


@contextmanager
def failing_alone(args: argparse.Namespace, what: str, method: str = "") -> Iterator[None]:
    """Turn an error into a row."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        reason = " ".join(str(error).replace("|", "/").split())[:200]
        add(args, what, method, None, None, f"failed: {type(error).__name__}: {reason}")


def about(args: argparse.Namespace) -> None:
    """What the numbers depend on."""
    args.threads = torch.get_num_threads()
    facts = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "CUDA": torch.version.cuda,
        **one_step.machine(args),
    }
    query = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
    if shutil.which(query[0]):
        done = subprocess.run(query, capture_output=True, text=True)
        facts["driver, memory"] = done.stdout.strip()
    for name, value in facts.items():
        add(args, "about", name, None, None, str(value))


def tests(title: str, files: str, args: argparse.Namespace) -> None:
    """Tests that are marked `cuda`, among them the parity vectors."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider"]
    command += files.split()
    output = subprocess.run(command, cwd=REPO / "tests", stdout=subprocess.PIPE, text=True).stdout
    print(output)
    summary = output.strip().splitlines()[-1].strip("= ")
    add(args, title, "ours", None, None, summary)


def steps(model: str, title: str, tasks: int, times: int, args: argparse.Namespace) -> None:
    """A stream by ours, with models in the GPU's memory and in the machine's; steps of the others,
    added up.
    """
    one_step.Steps.patience = 2.0
    if args.tiny:
        model = "tiny"
        one_step.Steps.patience = 0.1
    shapes = one_step.MODELS[model]
    layers = {shape: one_step.make_layer(shape, 0, args.device) for shape in shapes}
    weights_of_ours = {}
    for method in one_step.SOLVERS:
        with failing_alone(args, title, method):
            # first calls are slow
            weights = list(one_step.merge(method, list(layers.values()), args.device))
            if method == "ours":
                weights_of_ours = dict(zip(layers, weights, strict=True))
            seconds, memory = _stream(shapes, tasks, method, args.device, args.device)
            add(args, title, method, times * seconds, memory, "")
            if args.device != "cpu":
                seconds, memory = _stream(shapes, tasks, method, "cpu", args.device)
                name = f"{method}, models in main memory"
                add(args, title, name, times * seconds, memory, "")
    for method in one_step.METHODS:
        if method in one_step.SOLVERS:
            continue
        with failing_alone(args, title, method):
            total = 0.0
            peak = 0.0
            for done, (shape, number) in enumerate(shapes.items(), 1):
                weight, seconds, memory = _one_layer(method, layers[shape], args.device)
                total += tasks * number * seconds
                peak = max(peak, memory)
                remark = f"{done} of {len(shapes)} shapes, one layer of each"
                if method == "plain" and weights_of_ours:
                    tau = layers[shape][2] - layers[shape][0]
                    difference = (weight - weights_of_ours[shape]).norm() / tau.norm()
                    remark += f"; differs from ours by {difference:.1e} ‖τ‖"
                add(args, title, method, times * total, peak, remark)


def _one_layer(
    method: str, layer: one_step.Layer, device: str
) -> tuple[torch.Tensor, float, float]:
    """Return the merged weight, seconds and GB of the second call, or of the first, slower one if
    that is long.
    """
    merged: list[torch.Tensor] = []
    for _ in range(2):
        group = one_step.prepared(method, [layer])
        one_step.Steps.skipped = 0.0
        seconds, memory = one_step.timed(
            lambda group=group: merged.extend(one_step.merge(method, group, device))
        )
        if seconds > 5:
            break
    return merged[-1], seconds + one_step.Steps.skipped, memory


def _stream(shapes: Any, tasks: int, method: str, home: str, device: str) -> tuple[float, float]:
    """Merge tasks into all layers, which hold three; return seconds, and GB of GPU memory beside
    the models there.
    """
    layer_shapes: list[one_step.Shape] = []
    for shape, number in shapes.items():
        layer_shapes += number * [shape]
    theta_0 = {}
    merged = {}
    for i, shape in enumerate(layer_shapes):
        layer_0, layer_merged, _, _ = one_step.make_layer(shape, i, device)
        theta_0[str(i)] = layer_0.to(home)
        merged[str(i)] = layer_merged.to(home)
    config = dataclasses.replace(one_step.CONFIG, solver=one_step.SOLVERS[method])
    total = 0.0
    peak = 0.0
    for step in range(4, 4 + tasks):
        task = {}
        for i, shape in enumerate(layer_shapes):
            other_0, _, other_t, _ = one_step.make_layer(shape, 10_000 * step + i, device)
            task[str(i)] = theta_0[str(i)] + (other_t - other_0).to(home)
        merge_one = partial(fuse_layers, theta_0, merged, task, config, step=step, device=device)
        seconds, memory = one_step.timed(lambda: merged.update(merge_one()[0]))  # noqa: B023
        total += seconds
        peak = max(peak, memory)
    return total, peak


def order_free(args: argparse.Namespace) -> None:
    """Eight tasks at once by the order-free methods."""
    from order_free import ORDER_FREE, measure

    models = {
        "CLIP B/32": one_step.MODELS["clip-b32"],
        "one layer of 4096x4096": {(4096, 4096): 1},
    }
    if args.tiny:
        models = {"tiny layers": one_step.MODELS["tiny"]}
    for model, shapes in models.items():
        title = f"{model}, eight tasks at once"
        for method in ORDER_FREE:
            with failing_alone(args, title, method):
                measure((192, 160), 1, args.device, [method])  # first calls are slow
                seconds = render = memory = 0.0
                for shape, number in shapes.items():
                    row = measure(shape, 1, args.device, [method]).loc[method]
                    seconds += number * row["at once"]
                    render += number * row["render"]
                    memory = max(memory, row["memory"])
                add(args, title, method, seconds, memory, f"{render:.3g} s for rendering")


def folders(args: argparse.Namespace) -> None:
    """Some blocks of a Llama-7B through `nufilt merge`, on the GPU and on the CPU, then as many as
    disk and time have room for on the GPU, at best all.
    """
    from folders import SIZES, make_checkpoints

    model = "Llama-7B"
    config = SIZES["7B"]
    if args.tiny:
        model = "tiny Llama"
        config = SIZES["tiny"]
    start_seconds = 10  # of a process
    embeddings = 1.3  # they count as so many blocks
    all_blocks = config.num_hidden_layers
    blocks = min(4, all_blocks // 2)
    for devices in ([args.device, "cpu"], [args.device]):
        begin = time.time()
        folder = args.scratch / f"{blocks}_blocks"
        config.num_hidden_layers = blocks
        make_checkpoints(config, folder, args.device)
        made = time.time() - begin
        free = shutil.disk_usage(args.scratch).free
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        title = f"`nufilt merge`, {model}, {blocks} of {all_blocks} blocks"
        add(args, title, "the inputs", made, None, f"{1e-9 * size:.3g} GB, made and written")
        for device in dict.fromkeys(devices):
            _merged_folders(args, title, folder, device)
        shutil.rmtree(folder)
        # How many times as much time and disk have room for; the result is a third of the inputs.
        left = args.until - time.time() - 5
        spent = time.time() - begin
        times_in_time = (left - start_seconds) / max(1, spent - start_seconds)
        times_on_disk = 0.9 * (free + size) / (size * 4 / 3)
        times = min(times_in_time, times_on_disk)
        more_blocks = min(all_blocks, int((blocks + embeddings) * times - embeddings))
        if more_blocks <= blocks:
            return
        blocks = more_blocks


def _merged_folders(args: argparse.Namespace, title: str, folder: Path, device: str) -> None:
    """Merge one more task by NUFILT, and two at once by `best` and as a sum."""
    from folders import measure, models_of

    for stream, method, name in (
        ("next", "nufilt", "ours, one more task"),
        ("two", "best", "best, two tasks"),
        ("two", "sum", "sum, two tasks"),
    ):
        row = f"{name}, on the {device}"
        with failing_alone(args, title, row):
            out = folder / "out"
            words = [*models_of(stream, folder), "--out", str(out), "--device", device]
            result = measure([*words, "--method", method, "--no-state"])
            shutil.rmtree(out)
            GB = {key: f"{1e-9 * result[key]:.3g} GB" for key in ("rss", "read", "written")}
            remark = (
                f"{GB['rss']} of main memory, {GB['read']} read, {GB['written']} written, "
                f"{result['cpu']:.0f} CPU seconds"
            )
            add(args, title, row, result["seconds"], 1e-9 * result["gpu"], remark)


parity = partial(tests, "parity vectors", "nufilt/test_parity.py")
clip_b32 = partial(steps, "clip-b32", "CLIP B/32, eight tasks", 7, 1)
clip_l14 = partial(steps, "clip-l14", "CLIP L/14, eight tasks", 7, 1)
llama_7b_block = partial(steps, "llama-7b-block", "Llama-7B, one task: 32 times a block", 1, 32)
OTHER_TESTS = "methods merge/test_fuse.py merge/test_merge.py"
other_tests = partial(tests, "other tests marked `cuda`", OTHER_TESTS)
PARTS: dict[str, tuple[Any, float]] = {  # what is done, and the seconds that it may take
    "about": (about, 30),
    "parity": (parity, 60),
    "clip-b32": (clip_b32, 60),
    "folders": (folders, 280),
    "llama-7b-block": (llama_7b_block, 90),
    "clip-l14": (clip_l14, 60),
    "order-free": (order_free, 60),
    "tests": (other_tests, 60),
}


def run_part(name: str, args: argparse.Namespace) -> None:
    """Run a part in a process of its own, and add a row if it ran over its limit or crashed."""
    limit = max(0, min(PARTS[name][1], args.until - time.time() - 3))
    command = [sys.executable, str(Path(__file__).resolve()), str(args.out)]
    command += ["--part", name, "--device", args.device, "--scratch", str(args.scratch)]
    command += ["--until", str(time.time() + limit)]
    if args.tiny:
        command.append("--tiny")
    with (args.out / "gpu.log").open("a") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
            if code:
                add(args, name, "", None, None, f"failed: its process ended with {code}")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # it and what it started
            process.wait()
            add(args, name, "", None, None, f"failed: over {limit:.0f} s")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--scratch", type=Path, default=Path("/tmp"), help="where checkpoints are made"
    )
    parser.add_argument(
        "--until", type=float, default=time.time() + 530, help="in seconds since 1970"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes")
    parser.add_argument("--part", choices=PARTS, help="this one alone, in this process")
    args = parser.parse_args(argv)
    args.rows = args.out / "gpu.jsonl"
    if args.part:
        with failing_alone(args, args.part):
            torch.ones(1, device=args.device)
            PARTS[args.part][0](args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    args.rows.write_text("")
    for name in PARTS:
        run_part(name, args)
        rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
        table = pd.DataFrame(rows, columns=COLUMNS, dtype=object)
        table = table.drop_duplicates(["what", "method"], keep="last")
        text = table.to_markdown(index=False, floatfmt=".3g", missingval="")
        (args.out / "gpu.md").write_text(f"# Merging on a GPU\n\n{text}\n")
        print(f"{name} done, {args.until - time.time():.0f} s left", flush=True)
    print(text)


if __name__ == "__main__":
    main()
