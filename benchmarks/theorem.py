"""Evaluate Theorem 1 on synthetic task vectors: measured misalignment and its bound, from tiny
errors to large ones.

    python benchmarks/theorem.py [--seeds 20] [--out docs/results/images/theorem_sweep.png]

A task vector is a matrix in the span of the data plus an error whose rows are all of one length.
Prints a table, and fails if the theorem is violated anywhere.
"""

import argparse
import math
from pathlib import Path
from statistics import median

import torch
from matplotlib.figure import Figure

from fusion_bench_nufilt.analysis.surrogates import TheoremCheck, check_theorem

SIZES = (1e-3, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.49, 0.7, 1.5)


def synthetic(
    seed: int, size: float, d_o: int = 24, d_i: int = 32, r_d: int = 4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return T_0 of rank r_d, E with rows of length ``size`` * T_0's smallest singular value /
    sqrt(d_o), and V_d.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    H = draw(40, r_d) @ draw(r_d, d_i)
    T_0 = draw(d_o, 40) @ H
    sigma = float(torch.linalg.svdvals(T_0)[r_d - 1])
    E = torch.nn.functional.normalize(draw(d_o, d_i), dim=1) * size * sigma / math.sqrt(d_o)
    return T_0, E, torch.linalg.svd(H, full_matrices=False).Vh[:r_d].mT


def draw_sweep(found: dict[float, list[TheoremCheck]]) -> Figure:
    """Plot both bounds and the measured misalignment over the size of the error."""
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for size, checks in found.items():
        axes.plot(
            [size] * len(checks),
            [check.misalignment for check in checks],
            "o",
            color="#0072B2",
            ms=3,
            alpha=0.6,
        )
    curves = (
        ("zeta", "bound of Theorem 1", "-"),
        ("zeta_spectral", "with the spectral norm of the error", "--"),
    )
    for key, label, line in curves:
        bounds = {
            size: median(getattr(check, key) ** 2 for check in checks)
            for size, checks in found.items()
        }
        known = {size: bound for size, bound in bounds.items() if math.isfinite(bound)}
        axes.plot(list(known), list(known.values()), line, color="#D55E00", label=label)
    axes.plot([], [], "o", color="#0072B2", ms=3, label="measured, a point for each draw")
    axes.axhline(1, color="0.7", lw=0.8)
    axes.set(xscale="log", yscale="log", xlabel="error, as a share of the smallest singular value")
    axes.set(ylabel="misalignment 1 - A", ylim=(1e-8, 1e3))
    axes.legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20, help="draws of each size")
    parser.add_argument("--out", type=Path, default=Path("outputs/theorem_sweep.png"))
    arguments = parser.parse_args()
    found = {
        size: [check_theorem(*synthetic(seed, size), 4) for seed in range(arguments.seeds)]
        for size in SIZES
    }
    print(
        "| error | misalignment, median | largest | bound | with the spectral norm | violations |\n"
        + "| --- " * 6
        + "|"
    )
    for size, checks in found.items():
        measured = [check.misalignment for check in checks]
        bounds = [
            median(getattr(check, key) ** 2 for check in checks)
            for key in ("zeta", "zeta_spectral")
        ]
        numbers = (median(measured), max(measured), *bounds)
        violated = sum(check.violated for check in checks)
        print(f"| {size} | {' | '.join(f'{number:.2g}' for number in numbers)} | {violated} |")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    draw_sweep(found).savefig(arguments.out, dpi=150)
    if any(check.violated for checks in found.values() for check in checks):
        raise SystemExit("Theorem 1 is violated")


if __name__ == "__main__":
    main()
