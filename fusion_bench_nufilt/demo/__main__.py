"""The program that `make demo` runs."""

import time
from pathlib import Path
from typing import Annotated

import typer

from fusion_bench_nufilt.commands.compare import compare
from fusion_bench_nufilt.demo import demo_folder

# The ranks have the paper's ratio to the width; its own, 128 and 64, would filter everything at a width of 128.
METHODS = """
    TSV-M with spectral voting = best,
    spectral voting = spectral,
    NUFILT all-linear = nufilt/all_linear,
    NUFILT (ranks 21/10/8) = nufilt:null_rank=21:lora_rank=10,
    OPCM = opcm,
    task arithmetic = task_arithmetic,
    TSV-M = tsvm,
    weight averaging = weight_average
"""


def main(
    out: Annotated[Path, typer.Option(help="Folder for the tables and pictures.")] = Path("outputs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of the task order.")] = 42,
) -> None:
    """Merge the demo's eight models by eight methods, and show what each of them keeps."""
    begin = time.perf_counter()
    demo_folder()  # made on first use, with a progress bar of its own
    compare(["fabric.accelerator=cpu"], METHODS, seeds=str(seed), out=out, overwrite=True)
    seconds = time.perf_counter() - begin
    print(f"{seconds:.0f} s in all. The digits depend on the CPU that trains the models, by a point or two.")


if __name__ == "__main__":
    typer.run(main)
