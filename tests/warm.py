"""Commands in processes of their own, forked from one that has imported what they need, which takes
a new process eight seconds.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path

MODULES = {"nufilt": "fusion_bench_nufilt.cli.app", "fusion_bench": "fusion_bench.__main__"}
IMPORTED = (
    "fusion_bench.scripts.cli",
    "fusion_bench_nufilt.continual",
    "fusion_bench_nufilt.compare.run",
    "fusion_bench_nufilt.compare.summary",
    "fusion_bench_nufilt.demo",
    "fusion_bench_nufilt.merge.folders",
    "tests.few_steps",
)


def run_command(words, timeout=600):
    """Run a command in the folder and the environment of this moment; return its exit code, which
    is negative if time ran out, and what it printed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        arguments = (words, os.getcwd(), dict(os.environ), output)
        process = context.Process(target=_become, args=arguments)
        process.start()
        process.join(timeout)
        process.kill()
        process.join()
        return process.exitcode, output.read_text(errors="replace")


def _become(words, folder, environment, output):
    """Be a command from now on."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with output.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.argv = list(words)
    runpy.run_module(MODULES[words[0]], run_name="__main__", alter_sys=True)
