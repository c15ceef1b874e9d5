"""What glibc does with memory that is freed."""

import subprocess
import sys

import pytest

from tests.conftest import REPO
from tests.merge.helpers import save_stream
from tests.tiny_models import llama

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="of glibc")

# Fills a block of 16 MB in one thread after the other, and prints how many pages of 4 KB the system
# cleared for each, and how many were kept in the end.
FILL = """
import resource, threading
from fusion_bench_nufilt.utils import heap

def fill():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(b"x") * 2**24
    cleared.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

def size():
    return int(open("/proc/self/statm").read().split()[1])

cleared = []
{settings}
before = size()
for _ in range(3):
    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
print(*cleared, size() - before)
"""
PAGES = 2**12


def fill(*settings):
    code = FILL.format(settings="\n".join(settings))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    return [int(number) for number in done.stdout.split()]


def test_memory_that_one_thread_freed_is_given_to_the_next_and_cleared_but_once():
    first, *others, kept = fill("heap.keep_freed_memory()")
    assert first > 0.9 * PAGES
    assert max(others) < 0.1 * PAGES
    assert kept > 0.9 * PAGES


def test_memory_is_given_back_for_a_process_that_goes_on():
    *cleared, kept = fill("heap.give_back_freed_memory()")
    assert min(cleared) > 0.9 * PAGES
    assert kept < 0.1 * PAGES


@pytest.mark.parametrize("second", ["heap.give_back_freed_memory()", "heap.keep_freed_memory()"])
def test_who_starts_the_process_decides_what_is_kept(second):
    *_, kept = fill("heap.keep_freed_memory()", second)
    assert kept > 0.9 * PAGES


@pytest.mark.slow
def test_a_plan_keeps_nothing_of_the_samples_that_it_reads(tmp_path):
    """Otherwise up to 200 MB stayed in the heap, in one process of six."""
    save_stream(tmp_path, llama())
    plan = (
        "from fusion_bench_nufilt.merge import plan_merge",
        f"plan_merge('{tmp_path}/base', ['{tmp_path}/task1'], method='sum')",
    )
    *_, kept = fill(*plan)
    assert kept < 0.1 * PAGES
