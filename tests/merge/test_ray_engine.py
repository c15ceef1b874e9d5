"""A merge on a cluster gives the local bits, whatever dies on the way, or says which node is in the
way of it.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from safetensors.torch import save_file

from fusion_bench_nufilt.merge.distributed import merge_on_cluster
from fusion_bench_nufilt.merge.output import work_folder
from fusion_bench_nufilt.methods.options import Settings
from tests.clusters import cluster_of
from tests.conftest import REPO
from tests.merge.helpers import hashes, merge, plan
from tests.models.test_adapters import save_all
from tests.tiny_models import llama

TASKS = ["task1", "task2"]
#: A layer takes long enough to be killed in.
LARGE = {"null_rank": 64, "lora_rank": 32, "max_steps": 30}


def save_matrices(folder, shape, number):
    """A base and two tasks of plain matrices."""
    random = torch.Generator().manual_seed(0)
    base = {}
    for layer in range(number):
        base[f"layers.{layer}.up_proj.weight"] = torch.randn(shape, generator=random)
    for name, scale in [("base", 0), ("task1", 0.01), ("task2", 0.01)]:
        (folder / name).mkdir()
        state = {}
        for key, value in base.items():
            state[key] = value + scale * torch.randn(shape, generator=random)
        save_file(state, folder / name / "model.safetensors", metadata={"format": "pt"})


def test_without_ray_the_error_names_the_extra(tmp_path, monkeypatch):
    save_matrices(tmp_path, (8, 8), 1)
    monkeypatch.setitem(sys.modules, "ray", None)
    message = r"engine 'ray' needs Ray .* pip install 'fusion-bench-nufilt\[ray\]'"
    with pytest.raises(ValueError, match=message):
        merge(tmp_path, TASKS, settings={"engine": "ray"})
    assert not (tmp_path / "out").exists()


def test_a_run_that_goes_on_with_no_layer_left_starts_no_worker(tmp_path, monkeypatch):
    save_matrices(tmp_path, (8, 8), 1)
    planned = plan(tmp_path, TASKS, settings={"engine": "ray"})
    monkeypatch.setitem(sys.modules, "ray", None)
    assert list(merge_on_cluster(planned, [], [], print)) == []


def test_an_address_is_for_a_cluster():
    with pytest.raises(ValueError, match="address 'auto' is for engine=ray"):
        Settings(address="auto")


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with a CPU each, and a store for objects that is smaller than the largest layer."""
    ray = pytest.importorskip("ray", reason="needs the extra [ray]")
    with cluster_of(node(), node()) as cluster:
        ray.init(cluster.address, log_to_driver=False)
        yield cluster


def node(**options):
    return {"num_cpus": 1, "object_store_memory": 80 * 2**20, **options}


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """Ten layers, and what they are merged to on this machine."""
    folder = tmp_path_factory.mktemp("stream")
    save_matrices(folder, (512, 512), 10)
    return folder, hashes(merge(folder, TASKS, "local", **LARGE))


def on_cluster(folder, out, address=None, **options):
    settings = {"engine": "ray", "address": address}
    return hashes(merge(folder, TASKS, out, settings=settings, **(options or LARGE)))


def is_computing(process):
    try:
        return process.name().startswith("ray::_do_piece")
    except psutil.NoSuchProcess:
        return False


def wait_for_a_worker():
    """The process of a worker, once one is at work on a layer."""
    while True:
        for process in psutil.Process().children(recursive=True):
            if is_computing(process):
                return process
        time.sleep(0.1)


@pytest.mark.slow
def test_every_node_gives_a_task_the_strength_that_it_has_here(cluster, tmp_path):
    save_all(tmp_path, llama(tie_word_embeddings=False))
    local = merge(tmp_path, ["task1", "adapter"], "local", method="best")
    ray = {"engine": "ray"}
    out = merge(tmp_path, ["task1", "adapter"], "on_cluster", method="best", settings=ray)
    assert hashes(out) == hashes(local)


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["worker", "node"])
def test_layers_of_a_worker_or_a_node_that_dies_are_given_to_others(cluster, stream, dies):
    folder, expected = stream
    if dies == "node":
        third = cluster.add_node(**node())

    def kill():
        process = wait_for_a_worker()
        if dies == "node":
            cluster.remove_node(third, allow_graceful=False)
        else:
            process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    assert on_cluster(folder, dies) == expected
    killer.join()


@pytest.mark.slow
def test_a_killed_driver_goes_on_where_it_stopped_and_two_do_not_write_one_folder(
    cluster, stream, caplog
):
    folder, expected = stream
    code = (
        "import pathlib, sys; from tests.merge import test_ray_engine\n"
        "test_ray_engine.on_cluster(pathlib.Path(sys.argv[1]), 'resumed', sys.argv[2])\n"
    )
    command = [sys.executable, "-c", code, str(folder), cluster.address]
    driver = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(REPO)})
    journal = work_folder(folder / "resumed") / "journal.jsonl"
    while not (journal.exists() and len(journal.read_text().splitlines()) > 2):
        assert driver.poll() is None
        time.sleep(0.02)
    with pytest.raises(ValueError, match="is writing"):
        on_cluster(folder, "resumed")
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    with caplog.at_level("INFO"):
        assert on_cluster(folder, "resumed") == expected
    assert "going on: " in caplog.text


@pytest.mark.slow
def test_a_node_that_lacks_the_files_says_so_by_name(cluster, tmp_path, monkeypatch):
    save_matrices(tmp_path, (8, 8), 1)
    monkeypatch.chdir(tmp_path)
    for name in ("base", *TASKS):  # each process has a folder of its own behind this
        (tmp_path / name).rename(tmp_path / f"real_{name}")
        (tmp_path / name).mkdir()
        link = tmp_path / name / "model.safetensors"
        link.symlink_to(f"/proc/self/cwd/real_{name}/model.safetensors")
    message = r"node .*: '.*base/model.safetensors' can't be read: No such file or directory"
    with pytest.raises(ValueError, match=message):
        on_cluster(tmp_path, "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_layer_larger_than_the_store_for_objects_arrives_whole(cluster, tmp_path):
    save_matrices(tmp_path, (2**19, 48), 1)
    small = {"null_rank": 4, "lora_rank": 2, "max_steps": 2}
    assert on_cluster(tmp_path, "out", **small) == hashes(merge(tmp_path, TASKS, "local", **small))
