"""The cache: built once, whole or not at all, the same whoever builds it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusion_bench_nufilt import demo as demo_package
from fusion_bench_nufilt.compare.configs import quiet
from fusion_bench_nufilt.demo.train import TINY, Recipe, active_recipe

WEIGHTS = "model.safetensors"


@pytest.fixture
def copy(demo, tmp_path, monkeypatch):
    """A copy of the finished folder that a test may damage."""
    monkeypatch.setenv("NUFILT_CACHE", str(tmp_path))
    return shutil.copytree(demo, tmp_path / demo.name)


@pytest.fixture
def made(note_calls):
    """The names of the parts that are made from now on."""
    return note_calls(demo_package, "_make", lambda recipe, part, *_: part)


def test_a_finished_cache_is_used_as_it_is_whatever_else_lies_there(copy, made):
    (copy / "shapes" / ".DS_Store").write_text("x")
    assert demo_package.demo_folder() == copy
    assert made == []


def cut_short(file):
    file.write_bytes(file.read_bytes()[:10])


def turn_around(file):
    file.write_bytes(file.read_bytes()[::-1])


@pytest.mark.parametrize(
    ("name", "damage"),
    [("config.json", cut_short), (WEIGHTS, turn_around), ("digests.json", Path.unlink)],
)
def test_what_has_changed_or_is_missing_is_made_again_to_the_same_bits(copy, made, name, damage):
    demo_package.load_vision_model("shapes")
    before = {file.name: file.read_bytes() for file in (copy / "shapes").iterdir()}
    damage(copy / "shapes" / name)
    demo_package.load_vision_model("shapes")
    assert made == ["shapes"]
    assert {file.name: file.read_bytes() for file in (copy / "shapes").iterdir()} == before


def test_pretraining_gives_the_same_bits_for_any_seed_threads_and_gradient_mode(copy):
    before = (copy / "clip" / WEIGHTS).read_bytes()
    shutil.rmtree(copy / "clip")
    threads = torch.get_num_threads()
    torch.manual_seed(123)
    torch.set_num_threads(2)
    state = torch.get_rng_state()
    try:
        with torch.inference_mode():
            demo_package.demo_folder()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert (copy / "clip" / WEIGHTS).read_bytes() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_what_interrupted_and_killed_builds_left_is_swept_away_and_made_again(copy, monkeypatch):
    shutil.rmtree(copy / "digits")
    half = copy / ".digits-123.new"
    half.mkdir()
    (half / WEIGHTS).write_bytes(b"half")

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo_package, "finetune", interrupt)
        with pytest.raises(KeyboardInterrupt):
            demo_package.demo_folder()
    assert list(copy.glob("*digits*")) == []
    demo_package.demo_folder()
    assert (copy / "digits" / WEIGHTS).exists()


def test_who_comes_second_waits_and_builds_nothing(copy, made, monkeypatch, capsys):
    # The rival holds the lock, and finishes the missing part while we wait.
    shutil.move(copy / "digits", copy.parent / "aside")
    rival = demo_package.FileLock(copy / ".lock")
    rival.acquire()

    def finish(message):
        assert "waiting" in message
        shutil.move(copy.parent / "aside", copy / "digits")
        rival.release()

    monkeypatch.setattr(demo_package, "_say", finish)
    demo_package.demo_folder()
    assert made == []


def test_every_number_of_the_recipe_tells_in_the_fingerprint():
    fingerprints = {TINY.fingerprint()}
    for name, value in vars(TINY).items():
        fingerprints.add(replace(TINY, **{name: value + 1}).fingerprint())
    assert len(fingerprints) == len(vars(TINY)) + 1


def test_the_environment_chooses_the_recipe_and_the_folder(monkeypatch, tmp_path):
    for name in ("NUFILT_DEMO", "NUFILT_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert active_recipe() == Recipe()
    assert demo_package.cache_folder() == tmp_path / "fusion_bench_nufilt"
    monkeypatch.setenv("NUFILT_CACHE", str(tmp_path / "mine"))
    assert demo_package.cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("NUFILT_DEMO", "huge")
    with pytest.raises(ValueError, match=r"huge.*full, tiny"):
        active_recipe()


def test_building_and_loading_tell_what_is_built_and_nothing_else(copy, made, capfd):
    """Also while a comparison silences everything."""
    shutil.rmtree(copy / "digits")
    with quiet():
        demo_package.load_vision_model("digits")
    demo_package.load_clip()
    captured = capfd.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "building the demo, once" in captured.err


def test_a_cache_that_can_not_be_written_is_named_and_another_one_is_taken(
    demo, monkeypatch, tmp_path
):
    monkeypatch.delenv("NUFILT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with pytest.raises(OSError, match=r"/proc/none.*: set NUFILT_CACHE to a folder"):
        demo_package.demo_folder()
    monkeypatch.setenv("NUFILT_CACHE", str(demo.parent))
    assert demo_package.demo_folder() == demo
