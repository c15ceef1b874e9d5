"""Change the package by one line, and see whether its tests fail.

    python tools/mutations.py [WORD ...]

Each mutation of tools/mutations.toml is applied to a copy of the repository, and its tests are run
there, in a process that begins with the packages of others loaded. WORDs choose mutations by parts
of their files' names. The score of each package is printed at the end, and survivors with the
reason that the list gives for them; one without a reason ends the program with code 1.
"""

import contextlib
import importlib
import os
import shutil
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parent.parent
PACKAGE = "fusion_bench_nufilt"
COPIED = (PACKAGE, "tests", "config", "docs", "hydra_plugins", "examples", "tools", "benchmarks")
#: Modules of the tests that import most of the packages of others, which takes longest.
HELPERS = ("conftest", "merge.helpers", "cli.helpers", "continual.helpers", "pages.helpers")


def mutations() -> list[dict[str, Any]]:
    return tomllib.loads((REPO / "tools" / "mutations.toml").read_text())["mutation"]


def load_others() -> None:
    """Import what the tests import of the packages of others, and nothing of this one."""
    reader, writer = os.pipe()
    if not os.fork():
        sys.path.insert(0, str(REPO))
        for helper in HELPERS:
            importlib.import_module(f"tests.{helper}")
        with open(writer, "w") as pipe:
            pipe.write("\n".join(sys.modules))
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        names = pipe.read().split()
    for name in names:
        if name.partition(".")[0] not in (PACKAGE, "tests", "hydra_plugins"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    ours = [name for name in sys.modules if name.startswith(PACKAGE)]
    assert not ours, ours


def run_tests(copy: Path, tests: list[str]) -> int:
    """Run tests in a copy of the repository, in a process of their own; return their exit code."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    sys.dont_write_bytecode = True
    with open(copy / "log.txt", "w") as log, contextlib.redirect_stdout(log):
        options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", f"--rootdir={copy}"]
        code = pytest.main([*options, *tests])
    os._exit(int(code))


def is_caught(copy: Path, mutation: dict[str, Any]) -> bool:
    """Tell whether a test fails once a mutation is applied."""
    file = copy / PACKAGE / mutation["file"]
    text = file.read_text()
    file.write_text(text.replace(mutation["old"], mutation["new"]))
    try:
        code = run_tests(copy, mutation["tests"])
    finally:
        file.write_text(text)
    if code > 2:  # no tests, or a wrong command line
        raise SystemExit(f"{mutation['law']}: pytest ended with code {code}")
    return code != 0


def main(words: list[str]) -> int:
    chosen = []
    for mutation in mutations():
        if not words or any(word in mutation["file"] for word in words):
            chosen.append(mutation)
    load_others()
    caught: Counter[str] = Counter()
    number: Counter[str] = Counter()
    unexplained = 0
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for part in COPIED:
            shutil.copytree(REPO / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        for part in ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile"):
            shutil.copy(REPO / part, copy / part)
        for mutation in chosen:
            package = mutation["file"].partition("/")[0]
            number[package] += 1
            word = "caught"
            if is_caught(copy, mutation):
                caught[package] += 1
            else:
                reason = mutation.get("reason", "")
                word = f"survives: {reason}" if reason else "SURVIVES"
                unexplained += not reason
            print(f"{mutation['file']:32} {mutation['law']}: {word}", flush=True)
    print("\n| package | caught | of |\n| --- | ---: | ---: |")
    for package, count in number.items():
        print(f"| `{package}/` | {caught[package]} | {count} |")
    print(f"| all | {caught.total()} | {number.total()} |")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
