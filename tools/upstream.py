#!/usr/bin/env python
"""Lay NUFILT into a FusionBench checkout, as a contribution that its maintainers can review.

    python tools/upstream.py CHECKOUT [--format-patch nufilt.patch]

What is in ``tools/contribution`` is laid as it is; the mathematics and the selection of layers are the plugin's own
files, as far as the contribution imports them. ``docs/upstream.md`` says more.
"""

import argparse
import ast
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from fusion_bench_nufilt.continual import ProtocolConfig  # noqa: E402
from fusion_bench_nufilt.core import FusionConfig  # noqa: E402
from fusion_bench_nufilt.layers import TargetConfig  # noqa: E402

CONTRIBUTION = REPO / "tools" / "contribution"
PLUGIN, HOME = REPO / "fusion_bench_nufilt", "fusion_bench/method/nufilt"
METHODS = "fusion_bench/method/__init__.py"
PROTOCOL = ("shuffle_order", "seed", "save_on_every_step")
ORACLE = "# here comes `plain_step`, the formulas word for word\n"
#: What the contribution leaves out of ``layers/targets.py``: FusionBench handles heads by itself.
HEADS = r'    heads: str = option\(\n(?:        .*\n)+    \)\n|        _check_patterns\("heads", self.heads\)\n'
LICENCE = """\
Licence: the authors of the contributed files, which are under Apache-2.0 in the plugin fusion-bench-nufilt, offer them
under the MIT licence of FusionBench as well."""
MESSAGE = f"""\
feat: NUFILT, null-space filtering for data-free continual model merging

Qiu et al., ICLR 2026, https://arxiv.org/abs/2509.21413. One class for CLIP, Flan-T5, decoders and any other model of
matrices; no new dependency; works with transformers 4 and 5.

{LICENCE}
"""

#: Lines that are put into files of FusionBench: after the first line that contains the anchor.
INSERTIONS = {
    METHODS: [
        ('    "dop": [', '    "nufilt": ["NUFILTMerging"],\n'),
        ("    from .model_stock import ", "    from .nufilt import NUFILTMerging\n"),
    ],
    "mkdocs.yml": [("- OPCM: algorithms/opcm.md", "          - NUFILT: algorithms/nufilt.md\n")],
}
HEADER = f"""\
# {"=" * 77}
# FusionBench Method Configuration: NUFILT
# {"=" * 77}
# Null-space filtering for data-free continual model merging.
#
#   W <- W + tau (P + B A)
#
# with P the projector off what is merged already, and B A a small adapter that
# gives back what P took from the new task.
#
# Reference: Qiu et al., "Null-Space Filtering for Data-Free Continual Model
# Merging", ICLR 2026 (https://arxiv.org/abs/2509.21413).
# {"=" * 77}
# The defaults are the paper's: one setting for all models, task counts, orders.
_target_: fusion_bench.method.NUFILTMerging
"""


def contribution() -> dict[str, str]:
    """The new files: path in a FusionBench checkout, and content.

    Raises:
        ValueError: a file that is needed imports from a package what is in a module of it.
    """
    paths = [path for path in sorted(CONTRIBUTION.rglob("*")) if path.is_file() and path.suffix != ".pyc"]
    files = {path.relative_to(CONTRIBUTION).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    test = "tests/test_nufilt.py"
    files[test] = files[test].replace(ORACLE, function(REPO / "benchmarks" / "plain.py", "plain_step"))
    files["config/method/nufilt/nufilt.yaml"] = method_config()
    wanted = {module for own in ("__init__.py", "nufilt.py") for module in modules(own, files[f"{HOME}/{own}"])}
    while wanted:
        module = wanted.pop()
        if f"{HOME}/{module}" in files:
            continue
        source = (PLUGIN / module).read_text(encoding="utf-8")
        if module.endswith("__init__.py"):  # without the names that it collects, which need more modules
            source = f'"""{ast.get_docstring(ast.parse(source))}"""\n'
        files[f"{HOME}/{module}"] = rewritten(source)
        wanted |= {(Path(module).parent / "__init__.py").as_posix(), *modules(module, source)}
    return files


def modules(module: str, source: str) -> Iterator[str]:
    """The modules of the plugin, or of the contribution, that a module imports, such as ``core/fusion.py``."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not (node.level or f"{node.module}.".startswith(f"{PLUGIN.name}.")):
            continue
        package = Path(module).parents[node.level - 1] if node.level else Path()
        name = (node.module or "").removeprefix(PLUGIN.name if not node.level else "").strip(".")
        base = package / name.replace(".", "/")
        for path in [base] if is_module(base) else [base / alias.name for alias in node.names]:
            if not is_module(path):
                raise ValueError(
                    f"{module}, line {node.lineno}: import {path.name} from its module, not from a package"
                )
            yield f"{path.as_posix()}.py"


def is_module(path: Path) -> bool:
    return any((root / f"{path}.py").is_file() for root in (PLUGIN, CONTRIBUTION / HOME))


def rewritten(source: str) -> str:
    """A file of the plugin as one of FusionBench: its imports, and the pages that it points to."""
    source = re.sub(HEADS, "", re.sub(rf"\b{PLUGIN.name}\b", HOME.replace("/", "."), source))
    return re.sub(r"\b(docs|benchmarks)/[\w/]+\.md", "docs/algorithms/nufilt.md", source)


def function(path: Path, name: str) -> str:
    """The source of one function."""
    source = path.read_text(encoding="utf-8")
    (node,) = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name]
    return f"{ast.get_source_segment(source, node)}\n"


def method_config() -> str:
    """The YAML file, from the options themselves."""
    protocol = [each for each in dataclasses.fields(ProtocolConfig) if each.name in PROTOCOL]
    targets = [each for each in dataclasses.fields(TargetConfig) if each.name != "heads"]
    options = [*dataclasses.fields(FusionConfig), *targets, *protocol]
    entries = [(each.name, each.default, each.metadata["symbol"], each.metadata["help"]) for each in options]
    about = "Write the task pool's report on what was merged so far after every step, as report_{step}.json."
    entries.append(("evaluate_on_every_step", False, "", about))
    text = HEADER
    for name, default, symbol, help in entries:
        for line in textwrap.wrap(f"{symbol}: {help}" if symbol else help, 76, break_on_hyphens=False):
            text += f"# {line}\n"
        text += f"{name}: {default if isinstance(default, str) else json.dumps(default)}\n"
    return text


def insertions(checkout: Path) -> dict[str, str]:
    """The files of FusionBench that get a line more, with it; one that is not there is left out.

    Raises:
        ValueError: a line that the new one is to follow is not there; names the file.
    """
    changed = {}
    for path, lines in INSERTIONS.items():
        if not (checkout / path).is_file() and path != METHODS:  # a source distribution has no documentation
            continue
        text = (checkout / path).read_text(encoding="utf-8")
        for anchor, line in lines:
            before, found, after = text.partition(anchor)
            if not found:
                raise ValueError(f"{checkout / path} has no line with '{anchor.strip()}'")
            rest, end, after = after.partition("\n")
            if not after.startswith(line):
                text = f"{before}{found}{rest}{end}{line}{after}"
        changed[path] = text
    return changed


def lay(checkout: Path) -> list[str]:
    """Write the contribution into a checkout or an unpacked source distribution, formatted as FusionBench's code is.

    Laid again, it replaces what was laid before.

    Raises:
        ValueError: the folder is no FusionBench, or one that is too different.

    Returns:
        The paths that were written, relative to the folder.
    """
    if not (checkout / METHODS).is_file():
        raise ValueError(f"'{checkout}' is no FusionBench checkout: it has no {METHODS}")
    changed = insertions(checkout)
    shutil.rmtree(checkout / HOME, ignore_errors=True)
    written = []
    for path, text in {**contribution(), **changed}.items():
        if path.startswith("config/") and not (checkout / "config").is_dir():
            path = f"fusion_bench_{path}"  # as a source distribution names the folder
        target = checkout / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        if path.endswith(".sh"):
            target.chmod(0o755)
        written.append(path)
    code = [str(checkout / path) for path in written if path.endswith(".py") and path not in changed]
    for formatter in (
        ["isort", "--quiet", "--profile", "black", "--project", "fusion_bench"],
        ["black", "--quiet", "--fast"],
    ):
        subprocess.run([sys.executable, "-m", *formatter, *code], check=True)
    return sorted(written)


def format_patch(checkout: Path, paths: list[str]) -> str:
    """The written files as one patch for ``git am``; neither the branch nor the index of the checkout changes."""

    def git(*arguments: str, **environment: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout.strip("\n")

    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        git("read-tree", "HEAD", **index)
        git("add", "--force", "--", *paths, **index)
        tree = git("write-tree", **index)
    commit = git("commit-tree", tree, "-p", "HEAD", "-m", MESSAGE)
    return git("format-patch", "--stdout", "--no-signature", "-1", commit) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of a FusionBench checkout, main or v0.2.33")
    parser.add_argument("--format-patch", type=Path, metavar="OUT", help="also write a patch for git am")
    arguments = parser.parse_args()
    try:
        paths = lay(arguments.checkout)
        if arguments.format_patch is not None:
            arguments.format_patch.write_text(format_patch(arguments.checkout, paths), encoding="utf-8")
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    print(*paths, "", LICENCE, sep="\n")


if __name__ == "__main__":
    main()
