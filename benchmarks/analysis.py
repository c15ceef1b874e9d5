"""Measure the cost of an analysis: recording second moments, the losses of a step, and task vectors
of wide layers.

    python benchmarks/analysis.py [--images 128] [--width 4096] [--rounds 3]

Everything is measured in turn within each round, and the median ratio of the rounds is printed, so
that other work on the machine falls on both sides.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from merge_step import make_layer
from torch.utils.data import DataLoader
from transformers import CLIPVisionConfig, CLIPVisionModel

from fusion_bench_nufilt.analysis.pool import merged_layers
from fusion_bench_nufilt.analysis.record import forward, record_moments, shared_inputs
from fusion_bench_nufilt.analysis.subspaces import task_vector
from fusion_bench_nufilt.analysis.surrogates import data_free_losses, layer_losses
from fusion_bench_nufilt.core.subspace import gram_matrix, right_singular_basis, top_eigenvectors
from fusion_bench_nufilt.core.workers import map_layers


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def recording(images: int, rounds: int, config: CLIPVisionConfig) -> None:
    """Time recording second moments, and the forward passes alone, on ViT-B/32 in FusionBench's
    batches of 128.
    """
    model = CLIPVisionModel(config).eval()
    pictures = [(torch.randn(3, config.image_size, config.image_size), 0) for _ in range(images)]
    inputs = DataLoader(pictures, batch_size=128)  # type: ignore[arg-type, var-annotated]
    modules = [view.module for view in merged_layers(model, "auto").values()]
    owner = shared_inputs(model, modules, inputs)
    alone, recorded = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            alone.append(seconds(lambda: [forward(model, batch) for batch in inputs]))
            recorded.append(
                seconds(lambda: record_moments(model, inputs, owner, Path(folder), {}, 4 * 10**9))
            )
    share = median(b / a - 1 for a, b in zip(alone, recorded, strict=True))
    print(
        f"second moments of {len(set(owner.values()))} inputs, {images} images: {100 * share:.0f} "
        "% on top of forward"
    )


def losses(rounds: int, config: CLIPVisionConfig) -> None:
    """Time the stability and plasticity losses of a step on the merged layers of ViT-B/32, with the
    data-free ones.
    """
    d, wide = config.hidden_size, config.intermediate_size
    shapes = ([(d, d)] * 4 + [(wide, d)]) * config.num_hidden_layers
    layers = {shape: make_layer(shape, 0, "cpu")[:3] for shape in set(shapes)}
    X = torch.randn(2 * d, d)
    C = X.mT @ X / len(X)

    def measured(shape: tuple[int, int]) -> None:
        theta_0, theta, theta_t = layers[shape]
        layer_losses(theta + theta_t - theta_0, theta, theta_t, C, C)

    def data_free(shape: tuple[int, int]) -> None:
        theta_0, theta, theta_t = layers[shape]
        old, task = theta - theta_0, theta_t - theta_0
        V_p, V_t = right_singular_basis(old, min(128, d)), right_singular_basis(task, 8)
        data_free_losses(old + task, old, task, V_p, V_t)

    def step(work: Callable[[tuple[int, int]], None]) -> float:
        return seconds(lambda: list(map_layers(work, shapes, torch.device("cpu"))))

    times = [(step(measured), step(data_free)) for _ in range(rounds)]
    for place, name in enumerate(("measured losses", "data-free losses")):
        print(f"{name} of a step, {len(shapes)} layers: {median(t[place] for t in times):.1f} s")


def task_vectors(width: int, rounds: int) -> None:
    """Time the top 32 directions of a wide layer, and its Gram matrix with a full solver."""
    tau = torch.randn(width, width) / width
    ratios = [
        seconds(lambda: task_vector(tau, 32))
        / seconds(lambda: top_eigenvectors(gram_matrix(tau), 32))
        for _ in range(rounds)
    ]
    print(
        f"task vector of a {width} x {width} layer: {median(ratios):.2f} times its Gram matrix "
        "with a solver"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=128, help="to run through the model")
    parser.add_argument(
        "--width", type=int, default=4096, help="of the layer whose task vector is looked at"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a model of width 32 in place of ViT-B/32, to try this out",
    )
    arguments = parser.parse_args()
    config = CLIPVisionConfig(patch_size=32)
    if arguments.tiny:
        config = CLIPVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
        )
    recording(arguments.images, arguments.rounds, config)
    losses(arguments.rounds, config)
    task_vectors(arguments.width, arguments.rounds)


if __name__ == "__main__":
    main()
