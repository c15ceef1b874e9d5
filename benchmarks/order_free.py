"""Time order-free methods and NUFILT with one thread on eight tasks, one after another and at once, and on two at once.

    python benchmarks/order_free.py --models clip-b32,clip-l14,flan-t5-base
    python benchmarks/order_free.py --models 2048x2048,11008x4096 --methods mix --repeats 1

Prints a table of CPU seconds, medians, all methods side by side. A model is one layer of every shape times their
number. `gpu.py` also measures the rendering of methods whose update is made of polar factors with Newton-Schulz
iterations.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from unittest.mock import patch

import pandas as pd
import torch
from merge_step import CONFIG, MODELS, Shape, make_layer, now, timed
from torch import Tensor

from fusion_bench_nufilt.core import fuse_layers
from fusion_bench_nufilt.methods import ORDER_FREE, LayerMethod, find_method, sums

TASKS = 8
Kinds = Sequence[type[LayerMethod]]
POLAR = ("isotropic", "tsv_stream")  # methods whose update is made of polar factors


def polar(X: Tensor, f: Callable[[Tensor], Tensor] = torch.ones_like) -> Tensor:
    r"""Do the work of ``map_spectrum`` where f is constant, with products alone: Newton-Schulz iterations.

    The first eleven steps lift singular values of :math:`10^{-6}` to about 1, and the other four make them 1.
    """
    if X.shape[0] < X.shape[1]:
        return polar(X.mT, f).mT
    P = X / torch.linalg.matrix_norm(X)
    for a, b, c in [(3.4445, -4.7750, 2.0315)] * 11 + [(1.875, -1.25, 0.375)] * 4:
        G = P.mT @ P
        P = a * P + P @ torch.addmm(b * G, G, G, alpha=c)
    mean = (P * X).sum() / X.shape[1]  # of the singular values
    return f(mean.expand(X.shape[1]))[0] * P


@torch.no_grad()
def measure(
    shape: Shape, repeats: int, device: str = "cpu", kinds: Kinds = ORDER_FREE, polars: bool = False
) -> pd.DataFrame:
    """Return the seconds per layer by method, to add a task and to compute the weight, and the GB of GPU memory."""
    theta_0, theta, theta_t, _ = make_layer(shape, 0, device)
    rows, clock = [], time.process_time if device == "cpu" else now
    for _ in range(repeats):
        layers = [{"layer": weight} for weight in (theta_0, theta, theta_t)]
        added, memory = timed(partial(fuse_layers, *layers, CONFIG, step=4), clock)
        rows.append({"method": "nufilt", "add": added, "render": 0.0, "memory": memory})
        for kind in kinds:
            method: LayerMethod = kind(kind.Options(), ["layer"])
            state = method.start("layer", theta_0)
            for task in (theta, theta_t):
                state = method.add("layer", state, theta_0, task - theta_0)
            tau = theta_t - theta_0
            added, memory = timed(partial(method.add, "layer", state, theta_0, tau), clock)
            render = partial(method.weight, "layer", state, theta_0)
            rendered, peak = timed(render, clock)
            row = {"method": kind.name, "add": added, "render": rendered, "memory": max(memory, peak)}
            if polars and kind.name in POLAR:
                exact = render()
                with patch.object(sums, "map_spectrum", polar), patch.object(sums, "polar_factor", polar):
                    row["polar"], _ = timed(render, clock)
                    row["difference"] = float((render() - exact).norm() / (exact - theta_0).norm())
            rows.append(row)
    return pd.DataFrame(rows).groupby("method", sort=False).agg(median)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="clip-b32,clip-l14,flan-t5-base", help="or shapes such as 2048x2048")
    parser.add_argument("--methods", help="order-free methods; by default all")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    measure((64, 64), 1)  # first calls are slow
    columns = {}
    kinds = [find_method(name) for name in args.methods.split(",")] if args.methods else ORDER_FREE
    for model in args.models.split(","):
        layers = MODELS[model] if model in MODELS else {tuple(map(int, model.split("x"))): 1}
        total = sum(count * measure(shape, args.repeats, kinds=kinds) for shape, count in layers.items())
        columns[f"{model}, one by one"] = TASKS * (total["add"] + total["render"])
        columns[f"{model}, at once"] = TASKS * total["add"] + total["render"]
        columns[f"{model}, two"] = 2 * total["add"] + total["render"]
        # The first task is taken whole.
        for tasks, column in ((TASKS, f"{model}, one by one"), (TASKS, f"{model}, at once"), (2, f"{model}, two")):
            columns[column]["nufilt"] *= (tasks - 1) / tasks
    table = pd.DataFrame(columns)
    print(table.round(1).to_markdown())


if __name__ == "__main__":
    main()
