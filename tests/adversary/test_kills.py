"""Killed at random moments, both commands end with the hashes of a run that was not; two at once do
not mix.
"""

import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time

import pytest
from fusion_bench.utils import instantiate

from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.continual.run_folder import finished_step
from fusion_bench_nufilt.merge.output import work_folder
from tests.conftest import REPO
from tests.continual.baselines.helpers import demo_images
from tests.continual.helpers import logging_to
from tests.continual.test_resume import outcome
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


def run_demo(folder):
    """A run of `fusion_bench` on the demo, in a process that may be killed."""
    config = compose_run(["method=nufilt", "method.max_steps=2", "modelpool=nufilt_demo"])
    algorithm = logging_to(folder, instantiate(config.method))
    algorithm.run(instantiate(config.modelpool), demo_images())


def whole_steps(folder):
    """How many checkpoints are there; none of them may be damaged."""
    return sum(
        bool(finished_step(path).whole())
        for path in (folder / "checkpoints").glob("merged_model_*")
    )


@pytest.mark.nightly
def test_fusion_bench(tmp_path, demo):
    kills = 60
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # so that a new process is at work at once

    def start(folder):
        folder.mkdir(exist_ok=True)
        process = context.Process(target=run_demo, args=(folder,))
        process.start()
        return process

    def finished(folder):
        process = start(folder)
        process.join()
        return process.exitcode == 0

    assert finished(tmp_path / "first")  # has the fork server import everything
    begin = time.perf_counter()
    assert finished(tmp_path / "whole")
    seconds = time.perf_counter() - begin
    whole = outcome(tmp_path / "whole")

    moments, done, folder = random.Random(0), 0, tmp_path / "killed"
    while done < kills:
        before = whole_steps(folder)
        process = start(folder)
        process.join(moments.uniform(0.2, 1) * seconds)
        process.kill()
        process.join()
        assert whole_steps(folder) >= before
        if process.exitcode == 0:  # it was done before: from the start again
            assert outcome(folder) == whole
            shutil.rmtree(folder)
        else:
            done += 1
    assert finished(folder)
    assert outcome(folder) == whole


def merge_and_tell(inputs, start, errors):
    """Merge when the other is ready, too; what was wrong goes to ``errors``."""
    start.wait()
    try:
        merge(inputs, ["task1", "task2"])
        errors.put("")
    except Exception as error:
        errors.put(str(error) or repr(error))


@pytest.mark.nightly
def test_two_merges_into_one_folder_make_one_result_and_the_other_is_refused(inputs):
    whole = hashes(merge(inputs, ["task1", "task2"], "whole"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    start, errors = context.Barrier(2), context.SimpleQueue()
    both = [context.Process(target=merge_and_tell, args=(inputs, start, errors)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    said = [errors.get() for _ in both]
    assert "" in said, said
    for error in said:
        assert error == "" or "is writing" in error or "meanwhile" in error, error
    assert hashes(inputs / "out") == whole
    assert not work_folder(inputs / "out").exists()
