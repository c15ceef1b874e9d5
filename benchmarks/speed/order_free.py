"""Time order-free methods and NUFILT with one thread on eight tasks, one after another and at once,
and on two at once.

    python benchmarks/speed/order_free.py --models clip-b32,clip-l14,flan-t5-base
    python benchmarks/speed/order_free.py --models 2048x2048,11008x4096 --methods best --repeats 1

Prints a table of CPU seconds, medians, all methods side by side. A model is one layer of every
shape times their number.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial

import pandas as pd
import torch
from one_step import CONFIG, MODELS, Shape, make_layer, now, timed

from fusion_bench_nufilt import fuse_layers
from fusion_bench_nufilt.methods import ORDER_FREE, LayerMethod, find_method

TASKS = 8
Kinds = Sequence[type[LayerMethod]]


@torch.no_grad()
def measure(
    shape: Shape, repeats: int, device: str = "cpu", kinds: Kinds = ORDER_FREE
) -> pd.DataFrame:
    """Return by method the seconds a layer takes, those of its last rendering alone, and the GB of
    GPU memory.
    """
    layers = [make_layer(shape, number, device) for number in range(TASKS)]
    theta_0, theta, theta_t, _ = layers[0]
    rows, clock = [], time.process_time if device == "cpu" else now
    for _ in range(repeats):
        one_step = partial(
            fuse_layers, {"layer": theta_0}, {"layer": theta}, {"layer": theta_t}, CONFIG, step=4
        )
        step, memory = timed(one_step, clock)
        stream = (TASKS - 1) * step  # the first task is taken whole
        rows.append(
            {
                "method": "nufilt",
                "one by one": stream,
                "at once": stream,
                "two": step,
                "memory": memory,
            }
        )
        for kind in kinds:
            method: LayerMethod = kind(kind.Options(), ["layer"])
            base = theta_0[None]
            states, adds, renders, peaks = [method.init_state(["layer"], base)], [], [], []
            for own_theta_0, _, own_theta_t, _ in layers:
                add = partial(
                    method.update,
                    ["layer"],
                    states.pop(),
                    base,
                    base + (own_theta_t - own_theta_0),
                    step=1,
                    strength=1.0,
                    float64=False,
                )
                added, peak = timed(lambda: states.append(add()[0]), clock)  # noqa: B023
                render = partial(method.merged_weight, ["layer"], states[0], base, float64=False)
                rendered, most = timed(render, clock)
                adds, renders, peaks = [*adds, added], [*renders, rendered], [*peaks, peak, most]
            row = {
                "one by one": sum(adds + renders),
                "at once": sum(adds) + renders[-1],
                "render": renders[-1],
            }
            row |= {"method": kind.name, "two": sum(adds[:2]) + renders[1], "memory": max(peaks)}
            rows.append(row)
    return pd.DataFrame(rows).groupby("method", sort=False).agg("median")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default="clip-b32,clip-l14,flan-t5-base", help="or shapes such as 2048x2048"
    )
    parser.add_argument("--methods", help="order-free methods; by default all")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    measure((64, 64), 1)  # first calls are slow
    columns = {}
    kinds = [find_method(name) for name in args.methods.split(",")] if args.methods else ORDER_FREE
    for model in args.models.split(","):
        layers = MODELS[model] if model in MODELS else {tuple(map(int, model.split("x"))): 1}
        total = sum(
            count * measure(shape, args.repeats, kinds=kinds) for shape, count in layers.items()
        )
        columns |= {f"{model}, {tasks}": total[tasks] for tasks in ("one by one", "at once", "two")}
    table = pd.DataFrame(columns)
    print(table.round(1).to_markdown())


if __name__ == "__main__":
    main()
