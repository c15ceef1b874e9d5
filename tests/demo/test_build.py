"""The cache: built once, whole or not at all, the same whoever builds it."""

import shutil
from dataclasses import replace

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
def made(monkeypatch):
    """The names of the parts that are made from now on."""
    names = []
    make = demo_package._make

    def noted_make(recipe, part, draft, pretrained):
        names.append(part)
        make(recipe, part, draft, pretrained)

    monkeypatch.setattr(demo_package, "_make", noted_make)
    return names


def test_a_finished_cache_is_used_as_it_is(copy, made):
    assert demo_package.demo_folder() == copy
    assert made == []


def test_only_what_is_missing_is_built_again_to_the_same_bits(copy, made):
    before = (copy / "shapes" / WEIGHTS).read_bytes()
    shutil.rmtree(copy / "shapes")
    demo_package.demo_folder()
    assert made == ["shapes"]
    assert (copy / "shapes" / WEIGHTS).read_bytes() == before


FILES = ["config.json", WEIGHTS, "digests.json"]


@pytest.mark.parametrize("content", ["cut short", "other bytes", "gone"])
@pytest.mark.parametrize("name", FILES)
def test_a_part_whose_files_have_changed_is_made_again_to_the_same_bits(copy, made, name, content):
    demo_package.load_vision_model("shapes")
    file = copy / "shapes" / name
    before = file.read_bytes()
    if content == "cut short":
        file.write_bytes(before[: len(before) // 2])
    elif content == "other bytes":
        file.write_bytes(bytes(reversed(before)))
    else:
        file.unlink()
    demo_package.load_vision_model("shapes")
    assert made == ["shapes"]
    assert file.read_bytes() == before


def test_a_tokenizer_that_is_cut_short_is_made_again(copy, made):
    """It ended in a JSONDecodeError."""
    for file in copy.glob("clip/*.json"):
        file.write_bytes(file.read_bytes()[:10])
    assert demo_package.load_processor().tokenizer("a handwritten digit zero")
    assert made == ["clip"]


def test_what_else_lies_in_a_part_does_not_matter(copy, made):
    (copy / "shapes" / ".DS_Store").write_text("x")
    demo_package.demo_folder()
    assert made == []


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
    shutil.rmtree(copy / "digits")
    demo_package.load_vision_model("digits")
    demo_package.load_clip()
    captured = capfd.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "building the demo, once" in captured.err


def test_it_tells_that_it_is_built_while_a_comparison_silences_everything(copy, made, capfd):
    shutil.rmtree(copy / "digits")
    with quiet():
        demo_package.demo_folder()
    assert "building the demo, once" in capfd.readouterr().err


def test_a_cache_that_can_not_be_written_is_named_and_another_one_is_taken(
    demo, monkeypatch, tmp_path
):
    monkeypatch.delenv("NUFILT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with pytest.raises(OSError, match=r"/proc/none.*: set NUFILT_CACHE to a folder"):
        demo_package.demo_folder()
    monkeypatch.setenv("NUFILT_CACHE", str(demo.parent))
    assert demo_package.demo_folder() == demo
