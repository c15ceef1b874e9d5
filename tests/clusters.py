"""Ray in tests."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock


@contextmanager
def alone_with_ray() -> Iterator[None]:
    """Have the only cluster of all processes of the tests, since two starve each other's workers,
    and leave none behind.

    A lock and no `xdist_group`, which pytest-xdist does not see under pytest 9.2
    (https://github.com/pytest-dev/pytest-xdist/issues/1386).
    """
    ray = pytest.importorskip("ray", reason="needs the extra [ray]")
    lock = FileLock(Path(tempfile.gettempdir()) / "fusion_bench_nufilt_cluster.lock")
    with lock, pytest.MonkeyPatch.context() as patch:
        # Else other processes starve the workers of a busy machine.
        patch.setenv("RAY_worker_niceness", "0")
        yield
        ray.shutdown()
