"""One merging step, timed: the plain computation, ours, spectral voting, and FusionBench's OPCM,
WUDI and DOP.

Writes results.md and results.json. README.md in the folder above says what is measured and how.
"""

import argparse
import ctypes
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

# Spinning threads stall each other on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import psutil
import torch
from plain import needed_flops, plain_step
from torch import Tensor
from torch.utils.benchmark import Timer

from fusion_bench_nufilt import fuse_layers
from fusion_bench_nufilt.compare.experiment import read_peak, reset_peak
from fusion_bench_nufilt.merge.fuse import merge_matrices
from fusion_bench_nufilt.methods.options import SpectralConfig
from fusion_bench_nufilt.methods.spectral import Spectral
from fusion_bench_nufilt.methods.task_vector import TaskVector
from fusion_bench_nufilt.nufilt import FusionConfig
from fusion_bench_nufilt.nufilt.adapter import Objective, fit_adapter, loop_gram
from fusion_bench_nufilt.nufilt.subspace import null_space_filter, top_right_singular_vectors
from fusion_bench_nufilt.utils.devices import fast_in_float64

# Convolutions as matrices: in each stage those of the blocks (reducing, 3 x 3, expanding), and the
# shortcut's.
RESNET_50: Counter[tuple[int, int]] = Counter()
for width, blocks, d_i in ((64, 3, 64), (128, 4, 256), (256, 6, 512), (512, 3, 1024)):
    RESNET_50.update({(width, d_i): 1, (width, 4 * width): blocks - 1, (width, 9 * width): blocks})
    RESNET_50.update([(4 * width, width)] * blocks + [(4 * width, d_i)])
# Merged layers: how many of which shape (d_o, d_i).
MODELS = {
    "clip-b32": {(768, 768): 48, (3072, 768): 12},
    "clip-b16": {(768, 768): 48, (3072, 768): 12},
    "clip-l14": {(1024, 1024): 96, (4096, 1024): 24},
    "flan-t5-base": {(768, 768): 144, (2048, 768): 48, (768, 2048): 24},
    "gpt2-small": {(2304, 768): 12, (768, 768): 12, (3072, 768): 12, (768, 3072): 12},
    "resnet-50": RESNET_50,
    "llama-7b-block": {(4096, 4096): 4, (11008, 4096): 2, (4096, 11008): 1},
    "tiny": {(192, 160): 4, (160, 192): 2},
}
SOLVERS = {"ours": "adam", "closed form": "closed_form"}
OURS = (*SOLVERS, "spectral")
METHODS = ("plain", *OURS, "OPCM", "WUDI", "DOP")
PARTS = ("subspaces", "solve", "fuse")
DIFFERENCE = "‖ours - plain‖ / ‖τ‖"
CONFIG = FusionConfig()  # the paper's setting
NOTES = {
    "steps": "Seconds, float32, medians, all in one run. A model: one layer of every shape (ours: "
    "a group) times their number. A loop of WUDI or DOP is left after {patience:.0f} s, its "
    "remaining equal steps added up.",
    "limit": "Ours against its matrix products alone at the machine's rate. Parts: layer by layer "
    "on one CPU thread.",
    "memory": "A whole step in a fresh process, results written in place: peak over the three "
    "models' weights.",
}
Shape = tuple[int, int]
Layer = tuple[Tensor, Tensor, Tensor, Tensor]  # theta_0, theta, theta_t, initial A


def make_layer(shape: Shape, number: int, device: str) -> Layer:
    """A Gaussian weight, a merged model that holds three tasks, and the next; a task is 1 to 2 % of
    the weight.
    """
    random: dict[str, Any] = {
        "generator": torch.Generator(device).manual_seed(number),
        "device": device,
    }
    theta_0 = torch.randn(shape, **random) * shape[1] ** -0.5
    scale = theta_0.norm() * (0.01 + 0.01 * torch.rand((), **random))

    def task_vector() -> Tensor:
        # Shuffled rows and columns of random signs turn singular vectors into others.
        tau = _spectral(shape, device) * scale
        for axis, size in enumerate(shape):
            signs = torch.randint(0, 2, (size,), **random) * 2.0 - 1.0
            if axis == 0:
                signs = signs[:, None]
            tau = tau.index_select(axis, torch.randperm(size, **random)) * signs
        return tau

    theta = theta_0 + sum(task_vector() for _ in range(3))
    theta_t = theta_0 + task_vector()
    A = torch.randn(CONFIG.lora_rank, shape[1], **random) * CONFIG.init_std
    return theta_0, theta, theta_t, A


@functools.lru_cache(maxsize=1)
def _spectral(shape: Shape, device: str) -> Tensor:
    """Norm 1, random singular vectors, singular values proportional to k^-0.7."""
    random = torch.Generator(device).manual_seed(0)
    rank = min(shape)
    bases = []
    for size in shape:
        matrix = torch.randn(size, rank, generator=random, device=device)
        bases.append(torch.linalg.qr(matrix).Q)
    left, right = bases
    return (left * _spectrum(rank).to(device)) @ right.T


def _spectrum(rank: int) -> Tensor:
    spectrum = torch.arange(1, rank + 1, dtype=torch.float32) ** -0.7
    return spectrum / spectrum.norm()


class Steps:
    """FusionBench's tqdm here: leaves a loop of equal steps after ``patience`` s; ``skipped`` adds
    up the rest.
    """

    patience = math.inf
    skipped = 0.0
    write = staticmethod(lambda *_: None)

    def __init__(self, items: Any, **_: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        begin = now()
        for done, item in enumerate(self.items, 1):
            yield item
            if done == len(self.items):
                return
            elapsed = now() - begin
            if elapsed > Steps.patience:
                Steps.skipped += elapsed / done * (len(self.items) - done)
                return


def merge(
    method: str, layers: list[Layer], device: str, config: FusionConfig = CONFIG
) -> Iterator[Tensor]:
    """New weights, layer by layer; layers of equal shape come together."""
    if method in OURS:
        theta_0 = {}
        theta = {}  # or the votes, see `prepared`
        theta_t = {}
        lora_A = {}
        for number, layer in enumerate(layers):
            name = str(number)
            theta_0[name], theta[name], theta_t[name], lora_A[name] = layer
        if method == "spectral":
            yield from merge_by_voting(theta_0, theta, theta_t).values()
        else:
            config = dataclasses.replace(config, solver=SOLVERS[method])
            weights, _ = fuse_layers(theta_0, theta, theta_t, config, lora_A=lora_A)
            yield from weights.values()
    elif method == "plain":
        yield from (plain_step(*weights, config, A) for *weights, A in layers)
    else:
        module, peer_step = peer(method, device)
        with patch.object(module, "tqdm", Steps):
            yield from (peer_step(*weights) for *weights, _ in layers)


def merge_by_voting(
    theta_0: dict[str, Tensor], votes: dict[str, Tensor], theta_t: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Merge a task into the state of spectral voting after three tasks."""
    spectral = Spectral(SpectralConfig(), list(votes))
    states = {}
    for name, vote in votes.items():
        tau_norm = (theta_t[name] - theta_0[name]).norm()
        largest_sigma = tau_norm * _spectrum(min(vote.shape))[0]
        states[name] = {
            "votes": vote,
            "vote_energy": vote.double().square().sum(),
            "mean": largest_sigma,
            "rounding": torch.zeros(2),
            "count": torch.tensor(3),
        }
    return merge_matrices(spectral, theta_0, [theta_t], states=states, first_step=4)


def prepared(method: str, layers: list[Layer]) -> list[Layer]:
    """Return what a method starts from: spectral voting has a sum of votes in place of the merged
    weight.
    """
    if method != "spectral":
        return layers
    voting = []
    for theta_0, theta, theta_t, A in layers:
        votes = TaskVector(theta - theta_0).vote()[0].float()
        voting.append((theta_0, votes, theta_t, A))
    return voting


@functools.cache
def peer(method: str, device: str) -> tuple[Any, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """FusionBench's module, and its own computation for one layer, with the values of its YAML
    file.
    """
    name = method.split()[0].lower()
    module = importlib.import_module(f"fusion_bench.method.{name}.{name}")
    if method == "OPCM":
        opcm = module.OPCMForCLIP(alpha=0.5)
        opcm.previous_lambda_t = opcm.lambda_t = 1
        merge_linear = torch.no_grad()(opcm.merge_linear_weights)
        return module, lambda theta_0, theta, theta_t: merge_linear(
            theta, theta_0, theta_t, "", 0.5, device
        )
    if method == "DOP":
        dop = module.ContinualDOPForCLIP(
            alpha=0.8, ema_beta=0.999, svd_epsilon=0.99999, lr=1e-4, num_steps=200
        )
        dop._fabric_instance = importlib.import_module("lightning").Fabric(
            accelerator=device, devices=1
        )
        return module, lambda theta_0, *models: dop._optimize_weight(
            theta_0, dict(enumerate(models)), "", 1
        )

    def wudi(theta_0: Tensor, *models: Tensor) -> Tensor:
        # Continually, as in NUFILT's paper: on the task vectors so far and new, 50 steps.
        task_vectors = [{"": model - theta_0} for model in models]
        return theta_0 + module.wudi_merging(task_vectors, device, 50)[""].detach()

    return module, wudi


def now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(work: Callable[[], object], clock: Callable[[], float] = now) -> tuple[float, float]:
    """Return a call's seconds, and the GB of GPU memory that it took at most beside what was held
    before it.
    """
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    begin = clock()
    held = torch.cuda.memory_allocated()
    work()
    seconds = clock() - begin
    return seconds, 1e-9 * (torch.cuda.max_memory_allocated() - held)


def matmul_rate(device: str, largest: int) -> float:
    """FLOP/s of float32 products of square matrices, at the best size."""
    rates = []
    for n in (768, 1536, 3072, 4096):
        if n > max(768, largest):
            break
        x = torch.randn(n, n, device=device)
        matmul = Timer("x @ x", globals={"x": x}, num_threads=torch.get_num_threads())
        seconds = matmul.blocked_autorange(min_run_time=0.5).median
        rates.append(2 * n**3 / seconds)
    return max(rates)


@torch.no_grad()
def split(layers: list[Layer]) -> dict[str, float]:
    """Seconds per layer of the parts of our step, one after another."""
    theta_0, theta, theta_t, A = map(torch.stack, zip(*layers, strict=True))
    tau = theta_t - theta_0
    tau_merged = theta - theta_0
    times = [now()]
    gram = loop_gram(tau)
    float64 = fast_in_float64(tau.device)
    V_t = top_right_singular_vectors(tau, CONFIG.task_rank, gram, float64=float64)
    V_p = top_right_singular_vectors(tau_merged, CONFIG.null_rank, float64=float64)
    tau_filtered = null_space_filter(tau, V_p)
    times.append(now())
    objective = Objective.build(tau, tau_filtered, tau_merged, V_t, V_p, gram)
    A, B, _ = fit_adapter(objective, A, lr=CONFIG.lr, max_steps=CONFIG.max_steps)
    times.append(now())
    torch.baddbmm(theta + tau_filtered, tau @ B, A)
    times.append(now())
    return {
        part: (b - a) / len(layers) for part, (a, b) in zip(PARTS, pairwise(times), strict=True)
    }


def measure_shape(shape: Shape, args: argparse.Namespace) -> dict[str, float]:
    """Seconds per layer, side by side: each repeat takes every method in turn, on the repeat's
    layer.
    """
    if args.device == "cpu":
        size = 2 * args.threads
    elif math.prod(shape) < 2**23:
        size = 16
    else:
        size = 4
    layers = [make_layer(shape, number, args.device) for number in range(size)]
    flops = needed_flops(*shape, CONFIG)
    columns: dict[str, list[float]] = defaultdict(list)
    for repeat in range(args.repeats):
        number = repeat % size
        weights = {}
        columns["products"].append(flops / matmul_rate(args.device, max(shape)))
        for method in args.methods:
            if method not in OURS and max(columns[method], default=0.0) > args.patience:
                continue
            Steps.patience = args.patience
            Steps.skipped = 0.0
            group = [layers[number]]
            if method in OURS:
                group = layers
            group = prepared(method, group)
            begin = now()
            merged = list(merge(method, group, args.device))
            seconds = (now() - begin + Steps.skipped) / len(group)
            columns[method].append(seconds)
            weights[method] = merged[number % len(merged)]
            print(
                f"  {shape[0]}x{shape[1]} #{repeat + 1} {method}: {seconds:.3f} s a layer",
                flush=True,
            )
        theta_0, _, theta_t, _ = layers[number]
        difference = weights["ours"] - weights.get("plain", math.nan)
        columns[DIFFERENCE].append((difference.norm() / (theta_t - theta_0).norm()).item())
        torch.set_num_threads(1)
        group = [layers[number]]
        if args.device == "cuda":
            group = layers
        for part, seconds in split(group).items():
            columns[part].append(seconds)
        torch.set_num_threads(args.threads)
    columns["GFLOP"] = [1e-9 * flops]
    columns[DIFFERENCE] = [max(columns[DIFFERENCE])]
    return {column: median(values) for column, values in columns.items()}


def table_rows(
    parts: list[tuple[dict[str, float], int]],
) -> tuple[dict[str, float], dict[str, float]]:
    """A model's rows in both tables, all methods and ours against the limit, from its shapes and
    their numbers.
    """
    total = {}
    for key in parts[0][0]:
        total[key] = sum(part[key] * count for part, count in parts)
    total[DIFFERENCE] = max(part[DIFFERENCE] for part, _ in parts)
    ours = total["ours"]
    methods = [method for method in METHODS if method in total]
    steps = {method: total[method] for method in methods}
    for method in methods:
        if method != "ours":
            steps[f"{method} / ours"] = total[method] / ours
    steps[DIFFERENCE] = total[DIFFERENCE]
    limit = {key: total[key] for key in ("ours", *PARTS, "GFLOP", "products")}
    limit["ours / products"] = ours / total["products"]
    limit["GFLOP/s"] = total["GFLOP"] / ours
    limit["matmul GFLOP/s"] = total["GFLOP"] / total["products"]
    return steps, limit


def measure_memory(
    method: str, layers: dict[Shape, int], device: str, threads: int
) -> dict[str, Any]:
    """A step over a whole model, to be run in a fresh process: MB at most over the three models'
    weights.

    Of the methods that iterate, all but ours stop early: their memory is known by then.
    """
    torch.set_num_threads(threads)
    model = []
    for shape, count in layers.items():
        model += [make_layer(shape, number, device) for number in range(count)]
    model = prepared(method, model)
    _spectral.cache_clear()
    if method not in ("plain", *OURS):
        peer(method, device)
    Steps.patience = 0.0
    config = FusionConfig(max_steps=2)
    if method in OURS:
        config = CONFIG
    # Give back what making the inputs freed, and count the peak from here.
    ctypes.CDLL(None).malloc_trim(0)
    if not reset_peak(torch.device(device)):
        raise OSError("the peak of the memory in use can't be reset here")
    held = psutil.Process().memory_info().rss
    if device == "cuda":
        held = torch.cuda.memory_allocated()
    begin = now()
    for (_, theta, _, _), weight in zip(model, merge(method, model, device, config), strict=True):
        # As FusionBench's methods and ours do: new weights take the place of old ones.
        theta.copy_(weight)
    seconds: float | str = now() - begin
    if method not in OURS:
        seconds = "cut short"
    peak = read_peak(torch.device(device))
    return {
        "three models, MB": 3e-6 * sum(layer[0].nbytes for layer in model),
        "extra MB": 1e-6 * (peak - held),
        "seconds": seconds,
    }


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    blas = re.search(r"- (.*Kernel Library.*)", torch.__config__.show())
    about: dict[str, Any] = {}
    if args.device == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
    about["cpu"] = cpu[1] if cpu else "?"
    about["cores"] = psutil.cpu_count()
    about["threads"] = args.threads
    for name in ("torch", "fusion-bench"):
        about[name] = importlib.metadata.version(name)
    about["blas"] = blas[1] if blas else "?"
    about["OMP_WAIT_POLICY"] = os.environ["OMP_WAIT_POLICY"]
    about["load before"] = round(os.getloadavg()[0], 2)
    return about


def report(results: dict[str, dict[str, Any]], patience: float) -> str:
    """Markdown, three digits."""
    lines = ["# One merging step", ""]
    lines += [f"- {key}: {value}" for key, value in results["machine"].items()]
    for name, note in NOTES.items():
        columns = list(next(iter(results[name].values()), {}))
        lines += ["", note.format(patience=patience), ""]
        lines += ["| | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
        for title, row in results[name].items():
            cells = [title, *map(cell, row.values())]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cell(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", default=",".join(list(MODELS)[:-1]), help=f"comma list of {', '.join(MODELS)}"
    )
    parser.add_argument(
        "--methods", default=",".join(METHODS), help="comma list; ours is always among them"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--layers", type=int, help="only the first so many shapes of each model, for a quick look"
    )
    parser.add_argument(
        "--patience", type=float, default=30.0, help="seconds that a call may take, see README.md"
    )
    parser.add_argument(
        "--no-memory",
        action="store_true",
        help="do not measure the memory of the first model's step",
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark"))
    args = parser.parse_args(argv)
    args.methods = [method for method in METHODS if method in [*args.methods.split(","), "ours"]]
    models = {
        name: dict(list(MODELS[name].items())[: args.layers]) for name in args.shapes.split(",")
    }
    torch.set_num_threads(args.threads)
    results: dict[str, dict[str, Any]] = {
        "machine": machine(args),
        "steps": {},
        "limit": {},
        "memory": {},
    }

    if not args.no_memory:
        name, layers = next(iter(models.items()))
        for method in args.methods:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                task = pool.submit(measure_memory, method, layers, args.device, args.threads)
                measured = task.result()
            results["memory"][f"{name}, {method}"] = measured
            print(f"  {name} {method}: {measured['extra MB']:.0f} MB", flush=True)

    Steps.patience = 0.0
    for method in args.methods:  # first calls are slow
        small_layer = make_layer((192, 160), 0, args.device)
        list(merge(method, prepared(method, [small_layer]), args.device))
    measures = {}
    for layers in models.values():
        for shape in layers:
            if shape not in measures:
                measures[shape] = measure_shape(shape, args)
    parts = [*models.items(), *(("one layer", {shape: 1}) for shape in measures)]
    for name, layers in parts:
        counts = [f"{count} of {d_o}x{d_i}" for (d_o, d_i), count in layers.items()]
        title = f"{name}: {', '.join(counts)}"
        rows = table_rows([(measures[shape], count) for shape, count in layers.items()])
        results["steps"][title], results["limit"][title] = rows

    results["machine"]["load after"] = round(os.getloadavg()[0], 2)
    text = report(results, args.patience)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "results.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
