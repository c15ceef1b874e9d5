"""Time a LoRA as the new task: its factors against their product, on one layer and one thread.

    python benchmarks/low_rank.py --size 4096 --rank 16 --rank 64

The merged model is that of merge_step.py; the LoRA has singular values proportional to k^-0.7 and
half a percent of the weight's norm. Medians of CPU seconds: other work on the machine counts less.
"""

import argparse
import time
from statistics import median

import torch
from merge_step import make_layer

from fusion_bench_nufilt.core import FusionConfig, LowRank, fuse_layers


def make_lora(theta_0, rank):
    """Return the factors of an update whose norm is 0.005 times that of theta_0."""
    random = torch.Generator().manual_seed(rank)
    d_o, d_i = theta_0.shape
    left, right = (
        torch.linalg.qr(torch.randn(size, rank, generator=random)).Q for size in (d_o, d_i)
    )
    spectrum = torch.arange(1, rank + 1) ** -0.7
    return LowRank(left * (spectrum * 0.005 * theta_0.norm() / spectrum.norm()), right.mT)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rank", type=int, action="append")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    theta_0, theta, _, _ = make_layer((args.size, args.size), 0, "cpu")
    print(
        "| layer | product (s) | factors (s) | product / factors | ‖difference‖ / ‖τ‖ |\n"
        + "| --- " * 5
        + "|"
    )
    for rank in args.rank or [16, 64]:
        lora = make_lora(theta_0, rank)
        tasks = {"product": theta_0 + lora.product(), "factors": lora}
        seconds, weights = {name: [] for name in tasks}, {}
        for _ in range(args.repeats):
            for name, task in tasks.items():
                begin = time.process_time()
                fused, _ = fuse_layers(
                    {"w": theta_0}, {"w": theta}, {"w": task}, FusionConfig(), step=2
                )
                seconds[name].append(time.process_time() - begin)
                weights[name] = fused["w"]
        product, factors = (median(seconds[name]) for name in tasks)
        difference = (weights["product"] - weights["factors"]).norm() / lora.product().norm()
        title = f"{args.size}x{args.size}, r = {rank}"
        print(
            f"| {title} | {product:.2f} | {factors:.2f} | {product / factors:.2g} | "
            f"{difference:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
