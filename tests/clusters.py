"""Ray in tests."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock


@contextmanager
def cluster_of(*nodes: dict[str, Any]) -> Iterator[Any]:
    """Have the only cluster of all processes of the tests, since two starve each other's workers,
    with nodes of these options, and leave none behind.

    A lock and no `xdist_group`, which pytest-xdist does not see under pytest 9.2
    (https://github.com/pytest-dev/pytest-xdist/issues/1386).
    """
    ray = pytest.importorskip("ray", reason="needs the extra [ray]")
    lock = FileLock(Path(tempfile.gettempdir()) / "fusion_bench_nufilt_cluster.lock")
    with lock, pytest.MonkeyPatch.context() as patch:
        # Else other processes starve the workers of a busy machine.
        patch.setenv("RAY_worker_niceness", "0")
        # Else Ray spills nothing to a disk that is 95 % full, however much is free there.
        patch.setenv("RAY_local_fs_capacity_threshold", "1")
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args=nodes[0])
        try:
            for node in nodes[1:]:
                cluster.add_node(**node)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
