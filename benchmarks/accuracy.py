"""How far float32 is from float64: the filtered task vector and the whole step, over the norm of
the task vector.

    python benchmarks/accuracy.py --shapes 768x768,3072x768

The layers are those of merge_step.py, with singular values k^-0.7; the other decays are of random
matrices.
"""

import argparse

import torch
from merge_step import CONFIG, make_layer
from torch import Tensor

from fusion_bench_nufilt.core import fuse_layers
from fusion_bench_nufilt.core.subspace import null_space_filter, top_right_singular_vectors


def task_vectors(shape: tuple[int, int], decay: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return a task vector and the sum of three others, float32, each with singular values
    k^-decay.
    """
    random = torch.Generator().manual_seed(seed)
    spectrum = torch.arange(1, min(shape) + 1, dtype=torch.float64) ** -decay

    def draw() -> Tensor:
        left, right = (
            torch.randn(d, min(shape), generator=random, dtype=torch.float64) for d in shape
        )
        return torch.linalg.qr(left).Q * spectrum @ torch.linalg.qr(right).Q.T

    return draw().float(), (draw() + draw() + draw()).float()


def filter_error(tau: Tensor, tau_merged: Tensor) -> float:
    filtered, exact = (
        null_space_filter(
            tau.double(),
            top_right_singular_vectors(tau_merged.to(dtype), CONFIG.null_rank).double(),
        )
        for dtype in (torch.float32, torch.float64)
    )
    return float((filtered - exact).norm() / tau.double().norm())


def step_error(shape: tuple[int, int], seed: int) -> float:
    layer = make_layer(shape, seed, "cpu")
    weights = []
    for dtype in (torch.float32, torch.float64):
        *models, lora_A = ({"": matrix.to(dtype)} for matrix in layer)
        weights.append(fuse_layers(*models, CONFIG, lora_A=lora_A)[0][""])
    return float((weights[0] - weights[1]).norm() / (layer[2] - layer[0]).norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="768x768,3072x768,768x2048,1024x1024")
    parser.add_argument(
        "--steps", default="4096x4096", help="shapes of which the step alone is measured"
    )
    parser.add_argument("--decays", default="0.1,0.4,0.7,1.0")
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    decays = [float(decay) for decay in args.decays.split(",")]
    print("| layer | " + " | ".join(f"filter, k^-{decay}" for decay in decays) + " | step |")
    print("| --- " * (len(decays) + 2) + "|")
    shapes, seeds = args.shapes.split(","), range(args.seeds)
    for text in [*shapes, *args.steps.split(",")]:
        d_o, d_i = (int(size) for size in text.split("x"))
        cells = ["" for _ in decays]
        if text in shapes:
            cells = [
                f"{max(filter_error(*task_vectors((d_o, d_i), d, seed)) for seed in seeds):.1e}"
                for d in decays
            ]
        cells.append(f"{max(step_error((d_o, d_i), seed) for seed in seeds):.1e}")
        print("|", " | ".join([text, *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
