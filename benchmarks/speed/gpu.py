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
        facts["driver, memory"] = subprocess.run(
            query, capture_output=True, text=True
        ).stdout.strip()
    for name, value in facts.items():
        add(args, "about", name, None, None, str(value))


def tests(title: str, files: str, args: argparse.Namespace) -> None:
    """Tests that are marked `cuda`, among them the parity vectors."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "cuda",
        "-p",
        "no:cacheprovider",
        *files.split(),
    ]
    done = subprocess.run(command, cwd=REPO / "tests", stdout=subprocess.PIPE, text=True).stdout
    print(done)
    add(args, title, "ours", None, None, done.strip().splitlines()[-1].strip("= "))


def steps(model: str, title: str, tasks: int, times: int, args: argparse.Namespace) -> None:
    """A stream by ours, with models in the GPU's memory and in the machine's; steps of the others,
    added up.
    """
    shapes, one_step.Steps.patience = (
        one_step.MODELS["tiny" if args.tiny else model],
        0.1 if args.tiny else 2.0,
    )
    layers, exact = {shape: one_step.make_layer(shape, 0, args.device) for shape in shapes}, {}
    for method in one_step.SOLVERS:
        with failing_alone(args, title, method):
            fused = list(
                one_step.merge(method, list(layers.values()), args.device)
            )  # first calls are slow
            exact |= dict(zip(layers, fused, strict=True)) if method == "ours" else {}
            for home in dict.fromkeys((args.device, "cpu")):
                seconds, memory = _stream(shapes, tasks, method, home, args.device)
                name = method if home == args.device else f"{method}, models in main memory"
                add(args, title, name, times * seconds, memory, "")
    for method in (method for method in one_step.METHODS if method not in one_step.SOLVERS):
        with failing_alone(args, title, method):
            total = most = 0.0
            for done, (shape, number) in enumerate(shapes.items(), 1):
                weight, seconds, memory = _one_layer(method, layers[shape], args.device)
                total, most = total + tasks * number * seconds, max(most, memory)
                remark = f"{done} of {len(shapes)} shapes, one layer of each"
                if method == "plain" and exact:
                    tau = layers[shape][2] - layers[shape][0]
                    remark += (
                        f"; differs from ours by {(weight - exact[shape]).norm() / tau.norm():.1e} "
                        "‖τ‖"
                    )
                add(args, title, method, times * total, most, remark)


def _one_layer(
    method: str, layer: one_step.Layer, device: str
) -> tuple[torch.Tensor, float, float]:
    """Return the merged weight, seconds and GB of the second call, or of the first, slower one if
    that is long.
    """
    merged: list[torch.Tensor] = []
    for _ in range(2):
        group, one_step.Steps.skipped = one_step.prepared(method, [layer]), 0.0
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
    every = dict(enumerate(shape for shape, number in shapes.items() for _ in range(number)))
    layers = {str(i): one_step.make_layer(shape, i, device) for i, shape in every.items()}
    theta_0, merged = (
        {name: layer[k].to(home) for name, layer in layers.items()} for k in range(2)
    )
    config, total, most = (
        dataclasses.replace(one_step.CONFIG, solver=one_step.SOLVERS[method]),
        0.0,
        0.0,
    )
    for step in range(4, 4 + tasks):
        task = {}
        for i, shape in every.items():
            other_0, _, other_t, _ = one_step.make_layer(shape, 10_000 * step + i, device)
            task[str(i)] = theta_0[str(i)] + (other_t - other_0).to(home)
        merge_one = partial(fuse_layers, theta_0, merged, task, config, step=step, device=device)
        seconds, memory = one_step.timed(lambda: merged.update(merge_one()[0]))  # noqa: B023
        total, most = total + seconds, max(most, memory)
    return total, most


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
        for kind in ORDER_FREE:
            with failing_alone(args, title, kind.name):
                measure((192, 160), 1, args.device, [kind])  # first calls are slow
                seconds = render = memory = 0.0
                for shape, number in shapes.items():
                    row = measure(shape, 1, args.device, [kind]).loc[kind.name]
                    seconds += number * row["at once"]
                    render += number * row["render"]
                    memory = max(memory, row["memory"])
                add(args, title, kind.name, seconds, memory, f"{render:.3g} s for rendering")


def folders(args: argparse.Namespace) -> None:
    """Some blocks of a Llama-7B through `nufilt merge`, then as many as disk and time have room
    for, at best all.
    """
    from folders import SIZES, make_checkpoints, measure

    config = SIZES["tiny" if args.tiny else "7B"]
    every, blocks, start = (
        config.num_hidden_layers,
        min(4, config.num_hidden_layers // 2),
        10,
    )  # to start takes 10 s
    for _ in range(2):
        begin, folder = time.time(), args.scratch / f"{blocks}_blocks"
        config.num_hidden_layers = blocks
        make_checkpoints(config, folder, args.device)
        made, free = time.time() - begin, shutil.disk_usage(args.scratch).free
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        result = measure(folder, ["--device", args.device])
        shutil.rmtree(folder)
        rss, read, written = (f"{1e-9 * result[key]:.3g} GB" for key in ("rss", "read", "written"))
        remark = (
            f"{rss} of main memory, {read} read, {written} written; the inputs were made in "
            f"{made:.0f} s"
        )
        title = (
            f"`nufilt merge`, {'tiny Llama' if args.tiny else 'Llama-7B'}, {blocks} of {every} "
            "blocks"
        )
        add(args, title, "ours", result["seconds"], 1e-9 * result["gpu"], remark)
        left, spent, others = (
            args.until - time.time() - 5,
            time.time() - begin,
            1.3,
        )  # embeddings count as 1.3 blocks
        times = min((left - start) / max(1, spent - start), 0.9 * (free + size) / (size * 4 / 3))
        blocks, before = min(every, int((blocks + others) * times - others)), blocks
        if blocks <= before:
            return


PARTS: dict[str, tuple[Any, float]] = {  # what is done, and the seconds that it may take
    "about": (about, 30),
    "parity": (partial(tests, "parity vectors", "nufilt/test_parity.py"), 60),
    "clip-b32": (partial(steps, "clip-b32", "CLIP B/32, eight tasks", 7, 1), 60),
    "folders": (folders, 260),
    "llama-7b-block": (
        partial(steps, "llama-7b-block", "Llama-7B, one task: 32 times a block", 1, 32),
        110,
    ),
    "clip-l14": (partial(steps, "clip-l14", "CLIP L/14, eight tasks", 7, 1), 60),
    "order-free": (order_free, 60),
    "tests": (
        partial(
            tests, "other tests marked `cuda`", "nufilt/test_fusion.py methods merge/test_merge.py"
        ),
        60,
    ),
}


def run_part(name: str, args: argparse.Namespace) -> None:
    """Run a part in a process of its own, and add a row if it ran over its limit or crashed."""
    limit = max(0, min(PARTS[name][1], args.until - time.time() - 3))
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        str(args.out),
        "--part",
        name,
        "--device",
        args.device,
    ]
    command += [
        "--scratch",
        str(args.scratch),
        "--until",
        str(time.time() + limit),
        *["--tiny"] * args.tiny,
    ]
    with (args.out / "gpu.log").open("a") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if code := process.wait(limit):
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
        found = pd.DataFrame(
            map(json.loads, args.rows.read_text().splitlines()), columns=COLUMNS, dtype=object
        )
        table = found.drop_duplicates(["what", "method"], keep="last")
        text = table.to_markdown(index=False, floatfmt=".3g", missingval="")
        (args.out / "gpu.md").write_text(f"# Merging on a GPU\n\n{text}\n")
        print(f"{name} done, {args.until - time.time():.0f} s left", flush=True)
    print(text)


if __name__ == "__main__":
    main()
