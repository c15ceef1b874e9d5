"""Killed at random moments, both commands end with the hashes of a run that was not; two at once do
not mix.
"""

import os
import subprocess
import sys

import pytest

from fusion_bench_nufilt.merge.output import work_folder
from tests.conftest import REPO
from tests.merge.helpers import hashes, merge

# One process imports everything, forks a merge that many times and kills it at a random moment;
# then once to the end.
KILLER = """
import os, pathlib, random, signal, sys, time
from transformers import LlamaForCausalLM
from fusion_bench_nufilt.methods.nufilt import Nufilt
from tests.merge.helpers import merge

folder, kills = pathlib.Path(sys.argv[1]), int(sys.argv[2])
tasks = ["task1", "task2"]


def slowly_merge(out):
    # Tiny layers would all be merged at once.
    update = Nufilt.update
    Nufilt.update = lambda *a, **k: (time.sleep(0.05), update(*a, **k))[1]
    merge(folder, tasks, out)


moments = random.Random(0)
for number in range(kills):
    out = f"out{number // 5}"  # five kills for each result
    journal, finished = folder / f".{out}.nufilt" / "journal.jsonl", folder / out
    recorded = lambda: len(journal.read_text().splitlines()) if journal.exists() else 0
    if not (child := os.fork()):
        slowly_merge(out)
        os._exit(0)
    before = recorded()
    # each run gets on, however slow the machine
    while recorded() <= before and not finished.exists():
        if os.waitpid(child, os.WNOHANG)[0]:
            sys.exit(f"a merge ended by itself, killed {number} times before")
        time.sleep(0.002)
    time.sleep(moments.uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not finished.exists() or (finished / "nufilt.json").exists()
    if number % 5 == 4:
        if not (child := os.fork()):
            merge(folder, tasks, out)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize(
    "kills",
    [pytest.param(2, marks=pytest.mark.slow), pytest.param(60, marks=pytest.mark.nightly)],
)
def test_nufilt_merge(inputs, kills):
    whole = hashes(merge(inputs, ["task1", "task2"], "whole"))
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLER, str(inputs), str(kills)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=540
    )
    assert done.returncode == 0, done.stderr
    for number in range(kills // 5):
        assert hashes(inputs / f"out{number}") == whole
        assert not work_folder(inputs / f"out{number}").exists()
