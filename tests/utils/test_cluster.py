"""Work side by side, in processes of this machine and with a stand-in for a Ray cluster."""

import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from fusion_bench_nufilt.utils import cluster
from tests.clusters import cluster_of
from tests.conftest import REPO
from tests.utils.work import double, name_itself, refuse, tidy_up_at_the_end, visible_gpus


@pytest.mark.slow
def test_local_processes_find_all_results_and_a_killed_one_is_said():
    work = {"one": (1,), "two": (2,)}
    assert dict(cluster.run_locally(work, double, 2)) == {"one": 2, "two": 4}
    with pytest.raises(ValueError, match="a process was killed, perhaps for want of memory"):
        list(cluster.run_locally({**work, "last": (-1,)}, double, 2))


#: How a program begins that `begin_program` starts.
PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.utils.work import grow, name_itself
from fusion_bench_nufilt.utils.cluster import run_locally
"""


def begin_program(code):
    """Begin a program that knows pieces of work, and that Ctrl-C ends even if this process runs in
    the background.
    """
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM + code],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_processes_that_grow_go_on():
    work = {str(number): (size,) for number, size in enumerate((1, 1, 400, 400, 1, 1))}
    program = begin_program(f"print(sorted(dict(run_locally({work}, grow, 2))))")
    try:
        assert program.communicate(timeout=240)[0].strip() == str(list(work))
    finally:
        program.kill()


@pytest.mark.slow
def test_processes_that_have_done_all_work_end_by_themselves(tmp_path):
    """Killed before they give back semaphores, they leave a warning of Python at the end."""
    files = [tmp_path / "one", tmp_path / "two"]
    work = {file.name: (file,) for file in files}
    assert dict(cluster.run_locally(work, tidy_up_at_the_end, 1)).keys() == work.keys()
    assert all(file.is_file() for file in files)


def has_ended(number, within=20):
    end = time.monotonic() + within
    while is_alive(number):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def is_alive(number):
    return psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_processes_end_when_their_results_are_no_longer_wanted():
    results = cluster.run_locally({"quick": (0,), "long": (600,)}, name_itself, 1)
    _, process = next(results)
    results.close()
    assert has_ended(process)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_program_that_began_them(number):
    work = {"quick": (0,), "long": (600,)}
    program = begin_program(
        f"for _, pid in run_locally({work}, name_itself, 1): print(pid, flush=True)"
    )
    try:
        process = int(program.stdout.readline())
        program.send_signal(number)
        program.wait(20)
    finally:
        program.kill()
    assert has_ended(process)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "expected"), [(2, "4"), (0, "4,7")])
def test_a_process_sees_its_own_gpu_alone_and_without_gpus_leaves_things_as_they_are(
    monkeypatch, count, expected
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert dict(cluster.run_locally({"a": ()}, visible_gpus, 1)) == {"a": expected}


@pytest.mark.parametrize(
    ("visible", "count", "expected"),
    [
        ("4,7", 2, ["4", "7", "4"]),
        (None, 2, ["0", "1", "0"]),
        ("GPU-a", 1, ["GPU-a"] * 3),
        (None, 0, [None] * 3),
    ],
)
def test_process_i_takes_gpu_i_modulo_their_number(monkeypatch, visible, count, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cluster.assign_gpus(3) == expected


def test_slots_are_cpus_or_gpus_or_nodes_as_large_as_the_smallest():
    node = {"Alive": True}
    with_cpus = {**node, "Resources": {"CPU": 8.0}}
    with_gpus = {**node, "Resources": {"GPU": 2.0, "CPU": 9.0}}
    dead = {"Resources": {"CPU": 2.0, "GPU": 1.0}, "Alive": False}
    ray = SimpleNamespace(nodes=lambda: [with_cpus, with_gpus, dead])
    assert cluster.find_slots(ray, gpus=False) == (17, 1, False)
    assert cluster.find_slots(ray, gpus=True) == (2, 4, True)
    assert cluster.find_slots(ray, gpus=False, whole_nodes=True) == (2, 8, False)
    for gpus in (False, True):
        with pytest.raises(ValueError, match=r"the Ray cluster has no [CG]PU"):
            cluster.find_slots(SimpleNamespace(nodes=list), gpus=gpus)


# --- a real cluster ---


@pytest.fixture(scope="module")
def ray():
    """Three nodes with a CPU each."""
    with cluster_of(*3 * [{"num_cpus": 1}]) as three:
        yield cluster.connect(three.address)


def run(ray, work, make=lambda: double):
    return cluster.run_on_cluster(ray, cluster.find_slots(ray, gpus=False), work, make)


@pytest.mark.slow
def test_work_that_kills_whoever_does_it_ends_the_run(ray):
    with pytest.raises(ValueError, match="a layer: 3 processes died of it"):
        list(run(ray, {"a layer": (-1,)}))


@pytest.mark.slow
def test_what_the_work_refuses_is_one_line_with_the_name_of_the_node_and_a_mistake_is_itself(ray):
    with pytest.raises(ValueError, match=r"^node .* \(\w{8}\): layer 'x' has NaN$"):
        list(run(ray, {"a layer": (ValueError("layer 'x' has NaN"),)}, make=lambda: refuse))
    with pytest.raises(KeyError):
        list(run(ray, {"a layer": (KeyError("oops"),)}, make=lambda: refuse))
    with pytest.raises(ValueError, match=r"^node .* \(\w{8}\): no such file$"):
        list(run(ray, {"a layer": (1,)}, make=lambda: refuse(OSError("no such file"))))


@pytest.mark.slow
@pytest.mark.parametrize("error", ["OutOfDiskError", "ObjectStoreFullError"])
def test_a_result_that_finds_no_room_in_the_store_for_objects_is_said(ray, error):
    work = {"a layer": (getattr(ray.exceptions, error)("full"),)}
    with pytest.raises(ValueError, match=r"^a layer: .*; the same command goes on"):
        list(run(ray, work, make=lambda: refuse))


@pytest.mark.slow
def test_a_node_with_other_versions_is_refused(ray, monkeypatch):
    monkeypatch.setattr(cluster, "package_versions", lambda: {"torch": "0.1"})
    with pytest.raises(
        ValueError, match=r"^node .* it has torch .* where the driver has 0\.1: install the same"
    ):
        list(run(ray, {"a layer": (1,)}))


@pytest.fixture
def ray_without_cluster(monkeypatch):
    """Ray, which knows no cluster."""
    ray = pytest.importorskip("ray", reason="needs the extra [ray]")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr("ray._private.utils.read_ray_address", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return ray


@pytest.mark.parametrize("address", [None, "auto"])
@pytest.mark.parametrize("record", ["file", "environment"])
def test_a_cluster_that_died_and_left_its_record_is_named_at_once(
    ray_without_cluster, monkeypatch, address, record
):
    nowhere = "127.0.0.1:1"
    if record == "file":
        monkeypatch.setattr("ray._private.utils.read_ray_address", lambda: nowhere)
    else:
        monkeypatch.setenv("RAY_ADDRESS", nowhere)
    message = "no Ray cluster at '127.0.0.1:1' .*refused.*unset the one, or .* `ray stop`"
    with pytest.raises(ValueError, match=message):
        cluster.connect(address)


@pytest.fixture
def answering_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_what_answers_and_is_no_cluster_is_said(
    ray_without_cluster, monkeypatch, answering_address
):
    def init(*arguments, **options):
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray_without_cluster, "init", init)
    with pytest.raises(ValueError, match=r"no Ray cluster at '127.* this program: Failed"):
        cluster.connect(answering_address)
