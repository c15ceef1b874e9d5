"""What merging costs, as the paper tabulates it."""

import math

from fusion_bench_nufilt.compare.paper import printed_tables
from fusion_bench_nufilt.compare.summary import Comparison, Mean

from .comparison_tables import Cell, Table, notes_on

_PRINTED_FOR = "clip-vit-base-patch32_TA8"
_COLUMNS = ["method", "iterations", "solving s", "subspaces s", "total s", "memory GB", "parameters M", "ACC %"]


def overhead_table(comparison: Comparison) -> Table:
    """Iterations at each step, and of the whole stream seconds, memory, parameters and ACC.

    The total is merging alone, without loading and scoring; subspaces are what is not the solver.
    """
    rows = []
    for method in comparison.methods:
        total, solving = method.seconds.mean, method.solving_seconds.mean
        numbers = (_of(method.iterations, 1), solving, total - solving, total, method.memory.mean / 1e9)
        acc = method.metrics["ACC"].percent() if method.matrices else "failed"
        rows.append(_row(method.spec.label, (*numbers, _of(method.parameters, 1e6)), acc))
    notes = [*notes_on(comparison), "memory: most in use between scorings, with all that stays loaded"]
    return Table(f"Cost of merging {len(comparison.tasks)} models", _COLUMNS, rows, 0, notes)


def printed_overhead() -> Table:
    """The paper's table, of another machine."""
    rows = []
    for method, numbers in printed_tables()["overhead", _PRINTED_FOR].items():
        printed = {name: number.value for name, number in numbers.items()}
        iterations, solving, total, memory, parameters = (
            printed.get(name, math.nan)
            for name in ("iterations", "solving_seconds", "total_seconds", "gpu_gigabytes", "parameters_millions")
        )
        ours = method.startswith("nufilt")  # the total of others has more than subspaces in it
        acc = Mean(printed["ACC"] / 100, (numbers["ACC"].deviation or 0) / 100, 10).percent()
        rest = total - solving if ours else math.nan
        rows.append(_row(method, (iterations, solving, rest, total, memory, parameters), acc))
    title = "The paper's: ViT-B/32, 8 models, ten orders, on a GPU that it does not name"
    notes = ["not comparable with seconds and memory of another machine", "subspaces: total - solving, computed here"]
    return Table(title, _COLUMNS, rows, 0, notes)


def _row(label: str, numbers: tuple[float, ...], acc: str) -> list[Cell]:
    iterations, *others = numbers
    texts = ["-" if math.isnan(iterations) else f"{iterations:.0f}"]
    texts += ["-" if math.isnan(number) else f"{number:.1f}" if number >= 0.1 else f"{number:.2g}" for number in others]
    return [Cell(label), *map(Cell, texts), Cell(acc)]


def _of(number: int | None, unit: float) -> float:
    return math.nan if number is None else number / unit
