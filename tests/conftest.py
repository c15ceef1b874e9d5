"""Fixtures shared by all tests."""

import gc
import logging
import os
import subprocess
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import hydra
import jinja2
import pytest
import torch
from hypothesis import settings
from peft import PeftModel

from fusion_bench_nufilt.compare import configs
from fusion_bench_nufilt.demo import demo_folder
from tests.process_state import unchanged_state

# No deadline: a busy machine may pause any example.
settings.register_profile("nufilt", max_examples=30, deadline=None)
settings.load_profile("nufilt")

# Fabric's own choice: a run is on the CPU also where there is a GPU, with the bits that tests
# compare it with.
os.environ.setdefault("LT_ACCELERATOR", "cpu")

REPO = Path(__file__).resolve().parent.parent
#: Where a law holds: also on a GPU, where there is one.
GPU = (
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
)
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
SHARED = Path(os.environ.get("NUFILT_SHARED", REPO.parent / "shared"))


@cache
def composed(program, *overrides):
    return hydra.compose(program, list(overrides))


def compose_once(program, overrides):
    """Compose, which takes Hydra a quarter of a second, and the same words are composed hundreds of
    times.
    """
    return deepcopy(composed(program, *overrides))


def pytest_sessionstart():
    configs.compose = compose_once  # also for files that compose as they are imported


def pytest_collection_finish():
    """Spare the garbage collector, which comparisons call after each run, what was imported."""
    gc.collect()
    gc.freeze()


def shared_or_skip(part: str) -> Path:
    """Path of test material that lies beside a developer's checkout and is not part of the
    project.
    """
    if not SHARED.is_dir() and "NUFILT_SHARED" not in os.environ:
        pytest.skip(f"test material is not at hand (looked in {SHARED}; set NUFILT_SHARED)")
    assert (SHARED / part).exists(), f"test material '{part}' is missing in {SHARED}"
    return SHARED / part


@pytest.fixture(autouse=True)
def state_of_the_process():
    """A test fails if it leaves changed what the whole process has, on which later ones depend."""
    with unchanged_state():
        yield


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk():
    """Tests cut no power, and waiting until files are on the disk takes a tenth of their time."""

    def sync(descriptor):
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        yield


@pytest.fixture(scope="session", autouse=True)
def adapters_without_cards():
    """peft compiles the template of a README for every adapter that it saves, which takes as long
    as all else.
    """

    def leave_out(self, output_dir):
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PeftModel, "create_or_update_model_card", leave_out)
        yield


@pytest.fixture(scope="session", autouse=True)
def templates_compiled_once():
    """A card's template is compiled for every merge, which takes a tenth of a tiny one's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2, "Template", cache(jinja2.Template))
        yield


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory):
    """A cache with the tiny version of the demo, built once for all tests."""
    cache = tmp_path_factory.mktemp("demo_cache")
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_demo(patch, cache)
        demo_folder()
    return cache


def use_tiny_demo(patch, cache):
    patch.setenv("NUFILT_DEMO", "tiny")
    patch.setenv("NUFILT_CACHE", str(cache))


@pytest.fixture
def demo(demo_cache, monkeypatch):
    """The finished folder of the tiny demo, with the environment pointing at it."""
    use_tiny_demo(monkeypatch, demo_cache)
    return demo_folder()


@pytest.fixture
def note_calls(monkeypatch):
    """Have the calls of a function noted, which is called as before; the list has what is noted of
    each: its arguments, or what a function makes of them.
    """

    def watch(owner, name, note=lambda *args, **options: args):
        function = getattr(owner, name)
        notes = []

        def noted(*args, **options):
            notes.append(note(*args, **options))
            return function(*args, **options)

        monkeypatch.setattr(owner, name, noted)
        return notes

    return watch


@pytest.fixture
def full_disk(tmp_path):
    """A folder on a disk that has room for 100 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "none", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk can't be mounted here")
    yield disk / "out"
    subprocess.run(["umount", disk], check=True)


@pytest.fixture
def fusion_bench(tmp_path, demo_cache):
    """Run FusionBench's command line in an empty folder and return what it did; logs go to
    ``tmp_path / "logs"``.
    """
    folder = tmp_path / "cwd"
    folder.mkdir()
    logs = tmp_path / "logs"
    environment = {
        **os.environ,
        "NUFILT_DEMO": "tiny",
        "NUFILT_CACHE": str(demo_cache),
        "COLUMNS": "200",
    }

    def run(*overrides, python=sys.executable, launcher=(), check=True):
        command = [*launcher, python, "-m", "fusion_bench", f"path.log_dir={logs}", *overrides]
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if check:
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    run.folder = folder
    run.environment = environment
    run.logs = logs
    return run


@pytest.fixture(autouse=True)
def root_level():
    """A command sets the level of the root logger, which later tests do not expect."""
    level = logging.root.level
    yield
    logging.root.setLevel(level)
