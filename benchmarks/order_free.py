"""Order-free methods and NUFILT on eight tasks, in seconds of one thread: one after another, and all eight at once.

    python benchmarks/order_free.py --models clip-b32,clip-l14,flan-t5-base

Prints a table. A model is one layer of every shape times their number; medians, all methods side by side.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import pandas as pd
import torch
from merge_step import CONFIG, MODELS, Shape, make_layer

from fusion_bench_nufilt.core import fuse_layers
from fusion_bench_nufilt.methods import ORDER_FREE, LayerMethod

TASKS = 8


def seconds(work: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@torch.no_grad()
def measure(shape: Shape, repeats: int) -> pd.DataFrame:
    """Return the seconds of a layer by method: to add a task, and to render the merged weight."""
    theta_0, theta, theta_t, _ = make_layer(shape, 0, "cpu")
    rows = []
    for _ in range(repeats):
        layers = [{"layer": weight} for weight in (theta_0, theta, theta_t)]
        rows.append({"method": "nufilt", "add": seconds(partial(fuse_layers, *layers, CONFIG, step=4)), "render": 0.0})
        for kind in ORDER_FREE:
            method: LayerMethod = kind(kind.Options(), ["layer"])
            state = method.start("layer", theta_0)
            for task in (theta, theta_t):
                state = method.add("layer", state, theta_0, task - theta_0)
            tau = theta_t - theta_0
            added = seconds(partial(method.add, "layer", state, theta_0, tau))
            rendered = seconds(partial(method.weight, "layer", state, theta_0))
            rows.append({"method": kind.name, "add": added, "render": rendered})
    return pd.DataFrame(rows).groupby("method", sort=False).agg(median)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="clip-b32,clip-l14,flan-t5-base")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    measure((64, 64), 1)  # first calls are slow
    columns = {}
    for model in args.models.split(","):
        total = sum(count * measure(shape, args.repeats) for shape, count in MODELS[model].items())
        columns[f"{model}, one by one"] = TASKS * (total["add"] + total["render"])
        columns[f"{model}, at once"] = TASKS * total["add"] + total["render"]
    table = pd.DataFrame(columns)
    table.loc["nufilt"] *= (TASKS - 1) / TASKS  # the first task is taken whole
    print(table.round(1).to_markdown())


if __name__ == "__main__":
    main()
