"""Measure every speed that the documentation tells, in one run on an idle machine.

    benchmarks/all.sh                   # everything, in less than 100 minutes of two cores
    benchmarks/all.sh lora folders      # these parts
    benchmarks/all.sh --tiny            # everything in tiny sizes, to see that it works, into
    copies in outputs/all

A part is a benchmark and writes one table between its marks on a page of the documentation, below a
line that says how and when it was measured. A part that fails leaves its table as it was. Rows with
a ratio more than 15 % off the one that stood there are marked. What a part prints, and the log of
the run, are kept in outputs/all.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from merge_step import METHODS, machine

HERE, SCRATCH = Path(__file__).parent, Path("outputs/all")
PAGES = [HERE.parent / "docs" / page for page in ("results/speed.md", "scale.md")]
PLACE = r"(?s)(?<=<!-- measured: {} -->\n\n).*?(?=\n\n<!-- end -->)"
IDLE, TOLERANCE, WIDTH = 0.5, 0.15, 120
LABELS = {
    "ours": "NUFILT",
    "closed form": "NUFILT, closed form",
    "spectral": "spectral voting",
    "WUDI": "WUDI, 50 steps",
    "WUDI closed form": "WUDI, closed form",
}
MARK, NOTE = " \\*", "\n\n\\* A ratio is more than 15 % off that of the run before."


def printed(text: str) -> list[pd.DataFrame]:
    """Return the Markdown tables in a text, with cells as they are written."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = (
            [cell.strip() for cell in line.strip()[1:-1].split("|")] for line in block.splitlines()
        )
        found.append(pd.DataFrame(rows, columns=head))
    return found


def ratios(table: pd.DataFrame, row: int, label: str, *columns: str) -> pd.DataFrame:
    """Add the ratios of columns, or of all, to what they have in one of the rows."""
    for column in columns or table.columns[1:]:
        values = table[column].astype(float)
        table[f"{column} / {label}"] = (values / values.iloc[row]).map("{:.3g}".format)
    return table


def steps(times: pd.DataFrame, _: pd.DataFrame, memory: pd.DataFrame) -> pd.DataFrame:
    """Return the methods' seconds and their ratios to NUFILT's by model, and their memory."""
    models = {
        row[""].split(":")[0]: row
        for row in times.to_dict("records")
        if not row[""].startswith("one layer")
    }
    columns = {
        f"{name} (s)": [row.get(method) for method in METHODS] for name, row in models.items()
    }
    columns |= {
        f"{name} / NUFILT": [row.get(f"{m} / ours") for m in METHODS]
        for name, row in models.items()
    }
    rows = memory.to_dict("records") if "extra MB" in memory else []
    extra = {row[""].split(", ")[1]: row["extra MB"] for row in rows}
    columns |= {"memory of the first (MB)": list(map(extra.get, METHODS))} if extra else {}
    table = pd.DataFrame(columns, list(METHODS)).dropna(how="all").fillna("")
    return table.rename(LABELS).reset_index(names="method")


def forecast(
    _: pd.DataFrame, small: pd.DataFrame, __: pd.DataFrame, large: pd.DataFrame
) -> pd.DataFrame:
    """Return what both models take by the number of workers."""
    hours = [
        size.iloc[:, 1:].add_prefix(f"{name}, ") for name, size in (("70B", small), ("671B", large))
    ]
    return pd.concat([small.iloc[:, :1], *hours], axis=1)


class Part(NamedTuple):
    minutes: float  # of two idle cores, as expected; three times as much ends the part
    command: str
    tiny: str  # further options, which win
    read: Callable[..., pd.DataFrame] = lambda table: (
        table
    )  # makes the table of all that is printed


BLOCKS = "" if shutil.disk_usage(".").free > 58e9 else " --blocks 24"  # a whole 7B takes 57 GB
TINY, SCORE = "--shapes tiny --repeats 1 --patience 0.1", "evaluation.py modelpool=nufilt_demo"
BLOCK = (
    "merge_step.py --shapes llama-7b-block --methods 'plain,closed form' --repeats 1 --no-memory"
)
FOLDERS = f"folders.py --again solver=closed_form{BLOCKS}"
NODES = "scale.py --check 1B --nodes 2 --threads 2"
PARTS = {
    "one_step": Part(
        8, "merge_step.py --shapes clip-b32,clip-l14,flan-t5-base --patience 2", TINY, steps
    ),
    "block": Part(8, BLOCK, TINY, steps),
    "accuracy": Part(3, "accuracy.py", "--shapes 64x48 --steps 48x48 --decays 0.7 --seeds 1"),
    "stream": Part(4, f"{SCORE} --run", "", lambda t: ratios(t, -1, "whole run")),
    "folders": Part(
        50, FOLDERS, "--size tiny", lambda t: ratios(t, 0, t.iloc[0, 0], "CPU minutes")
    ),
    "lora": Part(1, "low_rank.py", "--size 96 --rank 4 --repeats 1"),
    "order_free": Part(
        6,
        "order_free.py",
        "--models tiny --repeats 1",
        lambda t: ratios(t, 0, "NUFILT").filter(regex="^method|/"),
    ),
    "scoring": Part(
        3, f"{SCORE} --steps 3", "", lambda t: ratios(t, -1, "set up once", "all steps (s)")
    ),
    "machines": Part(9, NODES, "--check tiny", lambda t: ratios(t, 0, "one process", "seconds")),
    "forecast": Part(2, "scale.py", "--shrink 64", forecast),
}


def wait_until_idle(seconds: float) -> float:
    """Wait for at most so many seconds until the load is low; return how many of them are left."""
    deadline = time.monotonic() + seconds
    while (load := os.getloadavg()[0]) >= IDLE and time.monotonic() < deadline:
        time.sleep(5)
    print(
        f"load {load:.2f}"
        + ("" if load < IDLE else f": the machine was NEVER IDLE (below {IDLE})"),
        flush=True,
    )
    return max(0.0, deadline - time.monotonic())


def measure(name: str, part: Part, tiny: bool, pages: list[Path], about: str) -> bool:
    """Run a part and write its table into the page that has its marks; return whether a row was
    marked.
    """
    page = next(page for page in pages if re.search(PLACE.format(name), page.read_text()))
    command, begin = (
        f"{part.command} {part.tiny if tiny else ''}".strip(),
        f"{datetime.now():%Y-%m-%d %H:%M}",
    )
    about = f"`{command}`, {begin}, {about}, load {os.getloadavg()[0]:.2f} at the start."
    line = textwrap.fill(about, WIDTH, break_long_words=False, break_on_hyphens=False)
    script, *options = shlex.split(command)
    output = SCRATCH / f"{name}.txt"
    with output.open("w") as out, output.with_suffix(".errors").open("w") as errors:
        run = [sys.executable, str(HERE / script), *options]
        subprocess.run(run, stdout=out, stderr=errors, check=True, timeout=180 * part.minutes)
    table = part.read(*printed(output.read_text()))
    there = re.search(PLACE.format(name), text := page.read_text())
    table, off = marked(table.set_index(table.columns[0]), there[0] + "\n")
    rows = table.to_markdown(disable_numparse=True)
    page.write_text(
        f"{text[: there.start()]}{line}\n\n{rows}{NOTE if off else ''}{text[there.end() :]}"
    )
    return off


def marked(table: pd.DataFrame, text: str) -> tuple[pd.DataFrame, bool]:
    """Mark the rows of which a ratio is not that of the table in a text, and return whether there
    are any.
    """
    if not (known := printed(text)):
        return table, False
    before = known[0].set_index(known[0].columns[0]).rename(lambda row: row.removesuffix(MARK))
    now = table.filter(regex=" / (?!‖)").apply(pd.to_numeric, errors="coerce")
    before = before.reindex(index=now.index, columns=now.columns).apply(
        pd.to_numeric, errors="coerce"
    )
    off = ((now / before - 1).abs() > TOLERANCE).any(axis=1)
    return table.rename(lambda row: row + MARK if off[row] else row), bool(off.any())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="NAME", help=f"{', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--tiny", action="store_true", help="try everything out")
    parser.add_argument(
        "--wait", type=float, default=30, help="minutes, in all, for the load to fall below 0.5"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - PARTS.keys():
        parser.error(f"no part is called {', '.join(unknown)}: there are {', '.join(PARTS)}")
    about = machine(argparse.Namespace(device="cpu", threads=torch.get_num_threads()))
    print(
        *(f"{key}: {value}" for key, value in about.items()),
        f"date: {datetime.now():%Y-%m-%d %H:%M}",
        sep="\n",
    )
    short = f"{about['cpu']}, threads: {about['threads']}, torch {about['torch']}"
    pages, left, failed = PAGES, 60 * arguments.wait, []
    if arguments.tiny:
        pages, left, os.environ["NUFILT_DEMO"] = (
            [Path(shutil.copy(page, SCRATCH)) for page in PAGES],
            0.0,
            "tiny",
        )
    for name in arguments.parts or PARTS:
        print(f"\n{name}, about {PARTS[name].minutes} minutes", flush=True)
        left, begin = wait_until_idle(left), time.monotonic()
        try:
            off = measure(name, PARTS[name], arguments.tiny, pages, short)
            minutes = (time.monotonic() - begin) / 60
            print(
                f"{minutes:.1f} minutes"
                + (", some ratios MORE THAN 15 % OFF the table before" if off else "")
            )
        except Exception as error:  # whatever a benchmark does, the others are measured
            failed.append(name)
            print(f"FAILED, its table stays as it was; see {SCRATCH}/{name}.errors: {error!r}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
