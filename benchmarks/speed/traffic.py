"""Measure `nufilt merge` beside mergekit's task_arithmetic: seconds, page faults, fresh memory.

    OMP_WAIT_POLICY=passive python benchmarks/speed/traffic.py --size 135M
    python benchmarks/speed/traffic.py --size 1.1B --methods sum,nufilt,best --repeats 1
    python benchmarks/speed/traffic.py --size 1.1B --methods "mergekit,sum,sum --no-state"

Makes a base and two tasks in bfloat16, merges both tasks at once by each method in a process of its
own, the methods in turn, and prints a table of the median of each figure. "Fresh" are the bytes
that the kernel handed out and cleared, per parameter of the model: the page faults times the size
of a page, without those of the same merge of a model of two tiny blocks, which are the program's
own. Where the kernel hands out huge pages, a fault is one of 2 MB, and fresh is a lower bound.
"Cores" are the CPU seconds over those on the clock. A line for each merge, the last of several,
shows from its first second to its last how busy the cores were: eight steps, and a dot for none.

`sum` writes the state from which a merge goes on beside the model, of twice its bytes; mergekit
writes none, nor does `sum --no-state`.
"""

import argparse
import copy
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import folders
import numpy as np
import psutil
from transformers import LlamaConfig

SIZES = {
    "tiny": folders.SIZES["tiny"],
    # SmolLM2-135M and TinyLlama-1.1B
    "135M": LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
    ),
    "1.1B": LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
    ),
}
MERGEKIT = """\
merge_method: task_arithmetic
base_model: {base}
dtype: bfloat16
models:
  - model: {tasks[0]}
    parameters: {{weight: 0.5}}
  - model: {tasks[1]}
    parameters: {{weight: 0.5}}
"""
STEPS = ".▁▂▃▄▅▆▇█"
COLUMNS = ("wall s", "user s", "system s", "cores", "peak GB", "faults", "fresh B")


def command_of(method, folder):
    """Return the command that merges a folder's two tasks into `out`."""
    base, tasks, out = folder / "base", [folder / "merged", folder / "task"], folder / "out"
    if method == "mergekit":
        recipe = folder / "mergekit.yaml"
        recipe.write_text(MERGEKIT.format(base=base, tasks=tasks))
        program = Path(sys.executable).with_name("mergekit-yaml")
        return [str(program), str(recipe), str(out)]
    words = ["merge", "--base", str(base), "--out", str(out), "--method", *method.split()]
    for task in tasks:
        words += ["--task", str(task)]
    return [sys.executable, "-m", "fusion_bench_nufilt.cli.app", *words]


def measure(method, folder):
    """Merge in a process of its own, and return its figures, by the names of the columns, and the
    CPU seconds that it had taken at some seconds on the clock.
    """
    shutil.rmtree(folder / "out", ignore_errors=True)
    log = folder / "log"
    begin = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command_of(method, folder), stdout=output, stderr=output)
        watched = psutil.Process(process.pid)
        samples = [(0.0, 0.0)]
        ended = 0
        while not ended:
            time.sleep(0.05)
            times = watched.cpu_times()
            samples.append((time.perf_counter() - begin, times.user + times.system))
            # This process and its threads alone, and not what else ran before.
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{method}: {log.read_text()[-1000:]}")
    cpu = usage.ru_utime + usage.ru_stime
    figures = (seconds, usage.ru_utime, usage.ru_stime, cpu / seconds)
    peak = usage.ru_maxrss * 1024 / 1e9
    fresh = usage.ru_minflt * resource.getpagesize()
    row = dict(zip(COLUMNS, (*figures, peak, usage.ru_minflt, fresh), strict=True))
    return row, samples


def utilisation(samples, cores, length=60):
    """Return a line of so many signs, evenly over the time, that says how busy the cores were."""
    moments, cpu = zip(*samples, strict=True)
    edges = np.linspace(0, moments[-1], length + 1)
    taken = np.diff(np.interp(edges, moments, cpu))
    shares = taken / (cores * moments[-1] / length)
    steps = np.ceil(shares * (len(STEPS) - 1) - 0.5)
    return "".join(STEPS[int(step)] for step in steps.clip(0, len(STEPS) - 1))


def measured_in_turn(methods, folder, repeats):
    """Return by method the medians of the figures of several merges, and the samples of the last
    one.
    """
    rows = {method: [] for method in methods}
    samples = {}
    for _ in range(repeats):
        for method in methods:
            row, samples[method] = measure(method, folder)
            rows[method].append(row)
    medians = {}
    for method, runs in rows.items():
        medians[method] = {
            column: statistics.median(run[column] for run in runs) for column in COLUMNS
        }
    return medians, samples


def made(size, folder, blocks=None):
    """Make the models of a size, or with so many of its blocks, in a folder, if they are not there;
    return the parameters.
    """
    count = folder / "parameters"
    if not count.exists():
        shutil.rmtree(folder, ignore_errors=True)
        config = copy.copy(SIZES[size])
        config.num_hidden_layers = blocks or config.num_hidden_layers
        # The peak of a child begins at what its parent takes, and so much stays with whoever made
        # the models.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            parameters, _ = pool.submit(folders.make_checkpoints, config, folder).result()
        count.write_text(str(parameters))
    return int(count.read_text())


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", action="append", choices=SIZES, help="default: 135M")
    parser.add_argument(
        "--methods",
        default="mergekit,sum,sum --no-state,nufilt,best",
        help="with commas between them, each with its options, if any",
    )
    parser.add_argument("--blocks", type=int, help="of the model, instead of all of them")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("outputs/traffic"))
    parser.add_argument(
        "--keep", action="store_true", help="keep the checkpoints, and use those that are there"
    )
    arguments = parser.parse_args()
    methods = arguments.methods.split(",")
    if arguments.folder.exists() and not arguments.keep:
        parser.error(f"{arguments.folder} exists: remove it, or say --keep to use it")
    try:
        tiny = arguments.folder / "tiny"
        made("tiny", tiny)
        of_the_program, _ = measured_in_turn(methods, tiny, 1)
        print(f"| size | method | {' | '.join(COLUMNS)} |")
        print("| --- | --- " + "| ---: " * len(COLUMNS) + "|")
        lines = []
        for size in arguments.size or ["135M"]:
            folder = arguments.folder / size
            parameters = made(size, folder, arguments.blocks)
            medians, samples = measured_in_turn(methods, folder, arguments.repeats)
            for method, row in medians.items():
                fresh = (row["fresh B"] - of_the_program[method]["fresh B"]) / parameters
                cells = [f"{row[column]:.1f}" for column in COLUMNS[:5]]
                cells += [f"{row['faults']:,.0f}".replace(",", " "), f"{fresh:.1f}"]
                print(f"| {size} | {method} | {' | '.join(cells)} |", flush=True)
                lines.append(f"{size} {method:14} {utilisation(samples[method], os.cpu_count())}")
        print("\n".join(["", *lines]))
    finally:
        if not arguments.keep:
            shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
