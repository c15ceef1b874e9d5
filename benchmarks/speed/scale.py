"""What a merge of 70B or 671B parameters takes on 1 to 64 workers: measured here, added up for
there.

    python benchmarks/speed/scale.py

prints the tables of docs/results/speed.md.

    python benchmarks/speed/scale.py --check 0.1B
    python benchmarks/speed/scale.py --check 1B --nodes 2 --threads 2

hold the simulation against real merges on Ray clusters of 1, 2 and 3 nodes on this machine, and two
nodes against two threads.

A layer's seconds are those of one CPU, counted while it works on a layer whose sides are divided by
`--shrink`, times the ratio of operations. What is simulated: workers with some CPUs each, which
read base, merged and task weight of a layer from one file server or from copies on their own disks,
compute, and send what is stored to the driver, which alone writes. File server, disks and driver
have the given bandwidth each, and serve one transfer after the other.
"""

import argparse
import hashlib
import heapq
import json
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import torch
from folders import SIZES, make_checkpoints

import fusion_bench_nufilt.utils.cluster
from fusion_bench_nufilt import fuse_layers
from fusion_bench_nufilt.merge import merge_folders, plan_merge
from fusion_bench_nufilt.methods.nufilt import Nufilt
from fusion_bench_nufilt.methods.options import Settings
from fusion_bench_nufilt.nufilt import FusionConfig

STORED = 2  # bytes of a parameter, bfloat16
MODELS = 3  # base, merged, task
CONFIG = FusionConfig()
METHOD = Nufilt(CONFIG, [])


def llama_70b():
    d = 8192
    kv = 1024
    ffn = 28672
    blocks = 80
    return {
        "q, o": ((d, d), 2 * blocks),
        "k, v": ((kv, d), 2 * blocks),
        "gate, up": ((ffn, d), 2 * blocks),
        "down": ((d, ffn), blocks),
    }


def moe_671b():
    """61 blocks with latent attention, of which 58 have 256 experts and a shared one."""
    d = 7168
    ffn = 18432
    expert = 2048
    return {
        "q_a": ((1536, d), 61),
        "q_b": ((24576, 1536), 61),
        "kv_a": ((576, d), 61),
        "kv_b": ((32768, 512), 61),
        "o": ((d, 16384), 61),
        "dense gate, up": ((ffn, d), 6),
        "dense down": ((d, ffn), 3),
        "expert gate, up": ((expert, d), 58 * 257 * 2),
        "expert down": ((d, expert), 58 * 257),
    }


MODELS_OF = {"70B": llama_70b, "671B": moe_671b}


class Job(NamedTuple):
    """A layer."""

    seconds: float  # of one CPU
    read: float  # bytes
    written: float


def operations(d_o, d_i):
    """Operations of a step on a layer; an eigenvalue solver counts as the products that take as
    long.
    """
    ranks = CONFIG.ranks(d_i)
    smaller = min(d_o, d_i)
    r_p = min(ranks.null, smaller)
    r_l = ranks.lora
    flops = d_o * d_i * smaller  # the Gram matrix of what is merged
    # V_p comes from block iteration or from a full solver.
    if smaller >= max(256, 16 * r_p):
        block = 2 * ranks.null + 16
        flops += 12 * smaller * block * (2 * smaller + 4 * block)
    else:
        flops += 10 * smaller**3
    flops += 4 * d_o * d_i * (2 * r_p + 16 + r_l)
    # The loop multiplies by the task vector's Gram matrix, or by the task vector twice.
    if d_i <= 2 * d_o:
        flops += d_o * d_i**2
        height = d_i
    else:
        height = 2 * d_o
    per_step = 2 * d_i * r_l * (height + 2 * (r_p + ranks.task) + 2 * r_l)
    return flops + CONFIG.max_steps * per_step


def measure(shape, shrink):
    """CPU seconds of a step on a layer of this shape."""
    d_o, d_i = [max(min(side, 512), side // shrink) for side in shape]
    random = torch.Generator().manual_seed(0)
    rank = min(512, d_o, d_i)
    decay = torch.arange(1, rank + 1.0) ** -0.7  # as the singular values of task vectors fall
    theta_0 = torch.randn(d_o, d_i, generator=random)

    def changed():
        left = torch.randn(d_o, rank, generator=random)
        right = torch.randn(d_i, rank, generator=random)
        update = (left * decay) @ right.T
        return theta_0 + update * (0.01 * theta_0.norm() / update.norm())

    theta = changed()
    theta_t = changed()
    begin = time.process_time()
    fuse_layers({"": theta_0}, {"": theta}, {"": theta_t}, CONFIG, step=2)
    seconds = time.process_time() - begin
    return seconds * operations(*shape) / operations(d_o, d_i)


def digest_seconds():
    """CPU seconds that a byte takes on its way: digest and copy."""
    data = bytes(2**26)
    begin = time.process_time()
    hashlib.sha256(bytearray(data))
    return (time.process_time() - begin) / len(data)


def simulate(jobs, workers, cpus, bandwidth, *, copies=False):
    """Return the seconds until the last layer is written; each of a worker's ``cpus`` has one layer
    at a time.

    With ``copies`` of the models on every worker, each reads from its own disk, else all from one
    file server.
    """
    free = []  # when each CPU is free, and its worker
    for worker in range(workers):
        free += cpus * [(0.0, worker)]
    reading = [0.0] * workers  # until when each disk is busy, or the first one as the file server
    writing = 0.0
    sent = []  # when a layer is computed, and how much of it goes to the driver
    for job in jobs:
        begin, worker = heapq.heappop(free)
        disk = 0
        if copies:
            disk = worker
        reading[disk] = max(reading[disk], begin) + job.read / bandwidth
        done = reading[disk] + job.seconds
        heapq.heappush(free, (done + job.written / bandwidth, worker))
        sent.append((done, job.written))
    for done, nbytes in sorted(sent):
        writing = max(writing, done) + nbytes / bandwidth
    return writing


def print_header(*columns):
    print(f"\n| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|", flush=True)


def print_row(*cells):
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def table(name, shrink, cpus, bandwidth):
    """What layers take, and what the model takes on so many workers."""
    kinds = MODELS_OF[name]()
    per_byte = digest_seconds()
    jobs = []
    largest = 0  # bytes of memory for a layer
    print_header(
        f"layers of the {name}",
        "shape",
        "number",
        "TFLOP",
        "CPU seconds",
        "MB read",
        "GB of memory",
    )
    for kind, (shape, number) in kinds.items():
        d_o, d_i = shape
        nbytes = STORED * d_o * d_i
        read = MODELS * nbytes
        seconds = measure(shape, shrink) + (MODELS + 1) * nbytes * per_byte
        memory = METHOD.working_bytes(shape, 4) + read
        layer_cells = [kind, f"{d_o} x {d_i}", number, f"{operations(d_o, d_i) / 1e12:.2f}"]
        print_row(*layer_cells, f"{seconds:.1f}", f"{read / 1e6:.0f}", f"{memory / 1e9:.1f}")
        jobs += number * [Job(seconds, read, nbytes)]
        largest = max(largest, memory)
    read = sum(job.read for job in jobs)
    written = sum(job.written for job in jobs)
    print(
        f"\n{read / 1e9:.0f} GB are read of the file server, "
        f"{written / 1e9:.0f} GB reach the driver."
    )
    print(f"A worker needs at most {cpus * largest / 1e9:.0f} GB of memory.")
    print_header(f"workers of {cpus} CPUs", "one file server (h)", "copies on every worker (h)")
    for workers in (1, 2, 4, 8, 16, 32, 64):
        from_server = simulate(jobs, workers, cpus, bandwidth)
        from_copies = simulate(jobs, workers, cpus, bandwidth, copies=True)
        print_row(workers, f"{from_server / 3600:.2f}", f"{from_copies / 3600:.2f}")


def check(size, folder, nodes, threads):
    """Real merges on nodes of one CPU each, beside the simulation fed with the seconds of their own
    layers.
    """
    import ray
    from ray.cluster_utils import Cluster

    make_checkpoints(SIZES[size], folder)
    starts = []

    def merge(out, **settings):
        names = [str(folder / name) for name in ("base", "task", "merged")]
        plan = plan_merge(names[0], [names[1]], names[2], CONFIG, settings=Settings(**settings))
        begin = time.perf_counter()
        merge_folders(plan, folder / out)
        files = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (folder / out).glob("*.saf*")
        }
        seconds = time.perf_counter() - begin
        manifest = json.loads((folder / out / "nufilt.json").read_text())
        return seconds, files, manifest

    def start(*arguments, begin_workers=fusion_bench_nufilt.utils.cluster._start):
        begin = time.perf_counter()
        started = begin_workers(*arguments)
        starts.append(time.perf_counter() - begin)
        return started

    torch.set_num_threads(threads)
    local, expected, manifest = merge("local")
    busy = sum(report[0]["seconds"] for report in manifest["layers"].values())
    print_header(
        f"{size} on", "seconds", "of these to start", "of its layers", "simulated", "files equal"
    )
    print(f"| this process, threads: {threads} | {local:.0f} | 0 | {busy:.0f} | | |", flush=True)
    fusion_bench_nufilt.utils.cluster._start = start
    for number in nodes:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        for _ in range(number - 1):
            cluster.add_node(num_cpus=1)
        seconds, files, manifest = merge(f"on{number}", engine="ray", address=cluster.address)
        layers = [report[0]["seconds"] for report in manifest["layers"].values()]
        jobs = [Job(seconds_of_layer, 0, 0) for seconds_of_layer in layers]
        simulated = simulate(jobs, number, 1, float("inf"))
        times = [f"{value:.0f}" for value in (seconds, starts[-1], sum(layers), simulated)]
        files_equal = "NO"
        if files == expected:
            files_equal = "yes"
        print_row(f"workers: {number}", *times, files_equal)
        ray.shutdown()
        cluster.shutdown()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=MODELS_OF, help="default: both")
    parser.add_argument("--shrink", type=int, default=8)
    parser.add_argument("--cpus", type=int, default=16, help="of a worker")
    parser.add_argument(
        "--bandwidth", type=float, default=10, help="of file server, disks and driver, Gbit/s"
    )
    parser.add_argument(
        "--check", choices=SIZES, help="merge synthetic checkpoints of this size on a cluster"
    )
    parser.add_argument(
        "--nodes", type=int, action="append", help="of the clusters; default: 1, 2 and 3"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the merge without a cluster")
    parser.add_argument("--folder", type=Path, default=Path("outputs/scale"))
    arguments = parser.parse_args()
    if arguments.check:
        try:
            check(
                arguments.check, arguments.folder, arguments.nodes or (1, 2, 3), arguments.threads
            )
        finally:
            shutil.rmtree(arguments.folder)
        return
    torch.set_num_threads(1)
    for name in arguments.model or MODELS_OF:
        table(name, arguments.shrink, arguments.cpus, arguments.bandwidth * 1e9 / 8)


if __name__ == "__main__":
    main()
