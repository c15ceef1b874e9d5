"""`make demo`: merge the eight models of the demo by NUFILT and by FusionBench's own continual methods."""

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console

from fusion_bench_nufilt.compare.run import compare
from fusion_bench_nufilt.compare.specs import parse_methods
from fusion_bench_nufilt.demo import demo_folder
from fusion_bench_nufilt.results.comparison import print_comparison

# The paper's ranks, 128 and 64 for a width of 768, would filter everything at the demo's width of 128. These have the
# same ratio to the width.
SCALED = "null_rank=21:lora_rank=10"
METHODS = f"""
    NUFILT (ranks 21/10/8) = nufilt:{SCALED},
    NUFILT all-linear (21/10/8) = nufilt/all_linear:{SCALED},
    NUFILT (paper's ranks 128/64/8) = nufilt,
    OPCM = opcm,
    task arithmetic = task_arithmetic,
    weight averaging = weight_average
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fusion_bench_nufilt.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/demo"), help="folder for the tables and pictures")
    parser.add_argument("--seed", type=int, default=42, help="seed of the task order")
    arguments = parser.parse_args()

    begin = time.perf_counter()
    demo_folder()  # made on first use, with a progress bar of its own
    comparison = compare(
        "nufilt_demo",
        parse_methods(METHODS),
        [arguments.seed],
        arguments.out,
        overrides=["fabric.accelerator=cpu"],
        overwrite=True,
        console=Console(file=sys.stderr),
    )
    files = comparison.save(arguments.out)
    print_comparison(comparison)
    print(f"{arguments.out}: {', '.join(files)}; {time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
