#!/usr/bin/env python
"""Write the demo's numbers and pictures into README and pages: ``make figures``.

    python tools/figures.py DEMO MORE RUN ANALYSIS

DEMO and MORE are folders of `nufilt compare`, RUN is one of `fusion_bench` with its
output in terminal.txt, ANALYSIS one of `nufilt analyze`: made on this machine by the commands in
the Makefile. A page has a number where it says ``<!-- figures: NAME -->``, up to ``<!-- end of
figures -->``; pictures of the pages are taken by Chromium.
"""

import argparse
import re
import shutil
import tempfile
import textwrap
from importlib.metadata import version
from pathlib import Path

import pandas as pd

REPO = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/results/accuracy.md")
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
WIDTH = 1100
#: Rows of README: the labels of DEMO (the Makefile's), and what stands for them there.
README_ROWS = {
    "individual": "individual models",
    "TSV-M with spectral voting": "`best`: TSV-M with spectral voting",
    "NUFILT all-linear": "NUFILT on all linear layers",
    "NUFILT (ranks 21/10/8)": "NUFILT on the paper's layers, ranks 21/10",
    "OPCM": "OPCM",
    "weight averaging": "weight averaging",
}
COMMAND = "fusion_bench method=nufilt modelpool=nufilt_demo method.null_rank=21 method.lora_rank=10"


def read_table(folder: Path) -> pd.DataFrame:
    """Return ACC and BWT of a comparison's methods by their labels, means over the seeds."""
    return pd.read_csv(folder / "results.csv").pivot_table("value", "method", "metric")


def per_cent(value: float, sign: str = "") -> str:
    """Return a share in per cent with one digit; nothing for none."""
    if pd.isna(value):
        return ""
    return f"{100 * value:{sign}.1f}"


def machine() -> str:
    """Return what a figure depends on besides its command."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = " ".join(line for line in lines if line.startswith("flags")).split()
    instructions = "AVX2"
    for flag, name in (("avx512f", "AVX-512"), ("amx_bf16", "AMX")):
        if flag in flags:
            instructions = name
    # Of torch without the name of its build, such as +cpu.
    versions = [f"{name} {version(name).split('+')[0]}" for name in ("torch", "transformers")]
    cores = len(names)
    processor = re.sub(r"\((R|TM)\)| Processor", "", names[0])
    return f"{cores} cores of an {processor} with {instructions}, {', '.join(versions)}"


def wrapped(text: str) -> str:
    """Return a paragraph in lines as long as those of the pages."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def result_table(rows: list[tuple[str, pd.Series]]) -> str:
    """Return rows of labels and results as a table of ACC and BWT."""
    lines = ["| method | ACC % | BWT % |", "| --- | ---: | ---: |"]
    for label, row in rows:
        line = f"| {label} | {per_cent(row.ACC)} | {per_cent(row.BWT, '+')} |"
        lines.append(line.replace("|  |", "| |"))
    return "\n".join(lines)


def blocks(demo: Path, more: Path) -> dict[str, str]:
    """Return the text of each block."""
    rows = read_table(demo)
    others = read_table(more).drop(["pretrained", "individual"])
    of_readme = [(label, rows.loc[name]) for name, label in README_ROWS.items()]
    single = rows.loc["individual"]
    ranked = [(f"{name} *", row) for name, row in rows.drop("individual").iterrows()]
    ranked = [(name.replace("pretrained *", "pretrained (zero-shot)"), row) for name, row in ranked]
    ranked += [(name, row) for name, row in others.iterrows()]
    ranked.sort(key=lambda pair: -pair[1].ACC)
    return {
        "machine": wrapped(
            f"All on one machine: {machine()}, fusion-bench {version('fusion-bench')}."
        ),
        "readme": result_table(of_readme),
        "where": wrapped(f"`make demo`: eight image tasks, seed 42, {machine()}."),
        "demo": result_table([("individual models", single), *ranked]),
    }


def console(run: Path) -> str:
    """Return the command of README and the ends of what it printed, as a block."""
    lines = (run / "terminal.txt").read_text(encoding="utf-8").splitlines()
    kept = []
    for start in ("│ 1 ", "│ 8 ", "ACC ", "BWT ", "model ", "page "):
        kept += [line for line in lines if line.startswith(start)][:1]
    # By default a run is in a folder with the time of its start.
    log_dir = "outputs/fabric_model_fusion/2026-11-26_09-00-00"
    shown = [line.replace(str(run), log_dir) for line in kept]
    return "\n".join(["```console", f"$ {COMMAND}", "…", shown[0], "…", *shown[1:], "```"])


def fill(text: str, values: dict[str, str]) -> str:
    """Return a page with the text of its blocks; a KeyError names one that is not known."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{values[match[2]]}\n\n{match[3]}", text)


def take_pictures(pages: dict[str, Path], folder: Path) -> None:
    """Write a picture of each page, from its top to its end, without scroll bars."""
    from PIL import Image
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    flags = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars"
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*flags.split(), f"--user-data-dir={profile}"):
            options.add_argument(flag)
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        browser = webdriver.Chrome(options=options, service=service)
        try:
            for name, page in pages.items():
                browser.set_window_size(WIDTH, 900)
                browser.get(page.resolve().as_uri())
                height = browser.execute_script("return document.documentElement.scrollHeight")
                browser.set_window_size(WIDTH, min(height, 2000))
                file = folder / f"{name}.png"
                browser.save_screenshot(str(file))
                with Image.open(file) as picture:
                    picture.convert("P", palette=Image.Palette.ADAPTIVE).save(file, optimize=True)
        finally:
            browser.quit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("demo", "more", "run", "analysis"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    values = blocks(arguments.demo, arguments.more)
    values["run"] = console(arguments.run)
    for name in PAGES:
        page = REPO / name
        page.write_text(fill(page.read_text(encoding="utf-8"), values), encoding="utf-8")
    images = REPO / "docs" / "images"
    shutil.copy(arguments.demo / "accuracy_per_step.png", images / "demo_accuracy_per_step.png")
    shutil.copy(arguments.run / "accuracy_matrix.png", images)
    pages = {"comparison": arguments.demo, "run": arguments.run, "analysis": arguments.analysis}
    take_pictures({f"page_{kind}": folder / "index.html" for kind, folder in pages.items()}, images)


if __name__ == "__main__":
    main()
