"""Time order-free methods and NUFILT with one thread on eight tasks, one after another and at once,
and on two at once.

    python benchmarks/speed/order_free.py --models clip-b32,clip-l14,flan-t5-base
    python benchmarks/speed/order_free.py --models 2048x2048,11008x4096 --methods best --repeats 1

Prints a table of CPU seconds, medians, all methods side by side. A model is one layer of every
shape times their number.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
from one_step import CONFIG, MODELS, Layer, Shape, make_layer, now, timed

from fusion_bench_nufilt import fuse_layers
from fusion_bench_nufilt.methods import ORDER_FREE, LayerMethod, find_method
from fusion_bench_nufilt.methods.task_vector import TaskVector

TASKS = 8
Clock = Callable[[], float]


@torch.no_grad()
def measure(
    shape: Shape, repeats: int, device: str = "cpu", methods: Sequence[str] = ORDER_FREE
) -> pd.DataFrame:
    """Return by method the seconds a layer takes, those of its last rendering alone, and the GB of
    GPU memory.
    """
    layers = [make_layer(shape, number, device) for number in range(TASKS)]
    clock = now
    if device == "cpu":
        clock = time.process_time
    rows = []
    for _ in range(repeats):
        rows.append(measure_nufilt(layers[0], clock))
        rows += [measure_order_free(find_method(name), layers, clock) for name in methods]
    return pd.DataFrame(rows).groupby("method", sort=False).agg("median")


def measure_nufilt(layer: Layer, clock: Clock) -> dict[str, Any]:
    """Time one step; a stream has one less than tasks, as the first task is taken whole."""
    models = [{"layer": weight} for weight in layer[:3]]
    step, memory = timed(partial(fuse_layers, *models, CONFIG, step=4), clock)
    stream = (TASKS - 1) * step
    return {
        "method": "nufilt",
        "one by one": stream,
        "at once": stream,
        "two": step,
        "memory": memory,
    }


def measure_order_free(
    kind: type[LayerMethod], layers: Sequence[Layer], clock: Clock
) -> dict[str, Any]:
    """Add the layers' tasks to one layer, and render the merged weight after each."""
    method: LayerMethod = kind(kind.Options(), ["layer"])
    base = layers[0][0][None]
    states = [method.init_state(base)]  # the last one alone is kept
    adds = []
    renders = []
    peaks = []
    for theta_0, _, theta_t, _ in layers:
        update = partial(
            method.update,
            states.pop(),
            base,
            TaskVector(base + (theta_t - theta_0), base),
            1,
        )
        seconds, peak = timed(lambda: states.append(update()[0]), clock)  # noqa: B023
        adds.append(seconds)
        peaks.append(peak)
        render = partial(method.merged_weight, states[0], base)
        seconds, peak = timed(render, clock)
        renders.append(seconds)
        peaks.append(peak)
    last_render = renders[-1]
    two_tasks = sum(adds[:2]) + renders[1]
    return {
        "method": kind.name,
        "one by one": sum(adds + renders),
        "at once": sum(adds) + last_render,
        "render": last_render,
        "two": two_tasks,
        "memory": max(peaks),
    }


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
    methods = ORDER_FREE
    if args.methods:
        methods = args.methods.split(",")
    for model in args.models.split(","):
        if model in MODELS:
            layers = MODELS[model]
        else:
            d_o, d_i = model.split("x")
            layers = {(int(d_o), int(d_i)): 1}
        total = 0.0
        for shape, count in layers.items():
            total += count * measure(shape, args.repeats, methods=methods)
        for tasks in ("one by one", "at once", "two"):
            columns[f"{model}, {tasks}"] = total[tasks]
    table = pd.DataFrame(columns)
    print(table.round(1).to_markdown())


if __name__ == "__main__":
    main()
