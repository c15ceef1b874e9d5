"""What glibc does with memory that is freed."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="of glibc")

# Fills a block of 32 MB in one thread after the other, and prints how many pages of 4 KB the system
# cleared for each, and how many were kept in the end.
FILL = """
import resource, threading
from fusion_bench_nufilt.utils import heap

def fill():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(b"x") * 2**25
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
PAGES = 2**13


def fill(*settings):
    code = FILL.format(settings="\n".join(f"heap.{setting}()" for setting in settings))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [int(number) for number in done.stdout.split()]


def test_memory_that_one_thread_freed_is_given_to_the_next_and_cleared_but_once():
    first, *others, kept = fill("keep_freed_memory")
    assert first > 0.9 * PAGES
    assert max(others) < 0.1 * PAGES
    assert kept > 0.9 * PAGES


def test_memory_is_given_back_for_a_process_that_goes_on():
    *cleared, kept = fill("give_back_freed_memory")
    assert min(cleared) > 0.9 * PAGES
    assert kept < 0.1 * PAGES


@pytest.mark.parametrize("second", ["give_back_freed_memory", "keep_freed_memory"])
def test_who_starts_the_process_decides_what_is_kept(second):
    *_, kept = fill("keep_freed_memory", second)
    assert kept > 0.9 * PAGES
