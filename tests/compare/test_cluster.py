"""A comparison on a cluster finds what it finds here."""

import pytest

from fusion_bench_nufilt.compare.run import compare
from fusion_bench_nufilt.compare.specs import parse_methods

pytestmark = pytest.mark.usefixtures("demo")


def run(out, **options):
    specs = parse_methods("nufilt:max_steps=1, opcm")
    return compare("nufilt_demo", specs, [42, 43], out, evaluate="last", **options)


def test_jobs_are_for_one_machine(tmp_path):
    with pytest.raises(ValueError, match="jobs=2 is for engine=local"):
        run(tmp_path, engine="ray", jobs=2)


@pytest.mark.slow
def test_a_cluster_finds_the_matrices_of_one_machine(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="needs the extra [ray]")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else other processes starve the workers of a busy machine
    from ray.cluster_utils import Cluster

    expected = run(tmp_path / "local")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    try:
        found = run(tmp_path / "cluster", engine="ray", address=cluster.address)
    finally:
        ray.shutdown()
        cluster.shutdown()
    for label, here in expected.methods.items():
        there = found.methods[label]
        assert not there.failures
        assert [matrix.rows() for matrix in there.matrices.values()] == [m.rows() for m in here.matrices.values()]
