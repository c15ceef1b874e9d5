"""A file is whole or not there."""

import hashlib
import json
import os
import subprocess
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fusion_bench_nufilt.continual.run_folder import finished_step
from fusion_bench_nufilt.utils.files import (
    atomic_file,
    atomic_folder,
    restore_folder,
    write_json,
    write_text,
)
from fusion_bench_nufilt.utils.manifest import (
    add_head,
    is_same_model,
    load_checkpoint,
    read_heads,
    read_manifest,
    save_checkpoint,
    verify_files,
    write_manifest,
)
from tests.tiny_models import Shared, clip, llava, t5


def everything_in(folder):
    return sorted(path.name for path in folder.rglob("*"))


def test_a_head_with_a_weight_of_its_own_is_not_called_tied(tmp_path):
    for tied in (True, False):
        model = t5()
        if not tied:
            model.lm_head.weight = nn.Parameter(model.shared.weight + 1)
        model.config.tie_word_embeddings = True  # as transformers 5 sets it for every T5
        save_checkpoint(model, tmp_path / str(tied), {}, {})
        config = json.loads((tmp_path / str(tied) / "config.json").read_text())
        assert config["tie_word_embeddings"] is tied


def test_any_module_is_saved_as_safetensors_with_tied_weights_once(tmp_path):
    save_checkpoint(Shared(), tmp_path / "step", {}, {})
    assert everything_in(tmp_path) == ["model.safetensors", "nufilt.json", "step"]
    assert len(load_file(tmp_path / "step" / "model.safetensors")) == 2


def fail(atomic, path, name):
    with atomic(path) as temporary:
        (temporary / name).write_text("half")
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("atomic", "path", "name"),
    [(atomic_folder, "step", "report.json"), (atomic_file, "step/report.json", "")],
)
def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path, atomic, path, name):
    (tmp_path / "step").mkdir()
    write_text(tmp_path / "step" / "report.json", "old")
    with pytest.raises(KeyboardInterrupt):
        fail(atomic, tmp_path / path, name)
    assert everything_in(tmp_path) == ["report.json", "step"]
    assert (tmp_path / "step" / "report.json").read_text() == "old"


def test_a_disk_that_is_full_is_named_and_nothing_is_left_on_it(full_disk):
    no_room = "no room left on the disk for"
    remedy = ".*No space left on device.*Make room"
    full_disk.mkdir()
    with pytest.raises(OSError, match=f"{no_room} '{full_disk / 'step'}': {remedy}"):
        save_checkpoint(nn.Linear(200, 200), full_disk / "step", {}, {})
    with pytest.raises(OSError, match=f"{no_room} '{full_disk}'"):
        write_text(full_disk / "text", "x" * 10**6)
    assert everything_in(full_disk) == []


def test_what_a_killed_process_left_gives_way_to_the_next_save(tmp_path):
    (tmp_path / ".step-123.new").mkdir()
    (tmp_path / ".step-123.new" / "half").touch()
    save_checkpoint(nn.Linear(2, 2), tmp_path / "step", {}, {})
    assert everything_in(tmp_path) == ["model.safetensors", "nufilt.json", "step"]


def test_what_a_killed_process_left_of_a_file_gives_way_to_the_next_write(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    of_living = f".table.csv-{os.getppid()}"
    (tmp_path / of_living).touch()
    (tmp_path / f".table.csv-{dead.pid}").touch()
    write_text(tmp_path / "table.csv", "a,b")
    assert everything_in(tmp_path) == [of_living, "table.csv"]


@pytest.mark.parametrize("umask", [0o022, 0o007, 0o077])
def test_the_umask_says_who_may_read_what_is_written(tmp_path, umask):
    before = os.umask(umask)
    try:
        save_checkpoint(clip(), tmp_path / "step", {}, {"state": torch.ones(2)})
        with atomic_file(tmp_path / "sums.safetensors") as temporary:
            save_file({"sums": torch.ones(2)}, temporary)
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 5
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}


class KilledError(Exception):
    pass


@pytest.mark.parametrize("killed_at", range(8))
def test_a_save_that_is_killed_at_any_moment_leaves_the_old_folder_or_the_new_one(
    tmp_path, monkeypatch, killed_at
):
    save_checkpoint(nn.Linear(2, 2), tmp_path / "step", {"step": 1}, {})
    moments = []

    def unless_dead(function):
        def call(*args, **kwargs):
            moments.append(function)
            if len(moments) > killed_at:  # a dead process does nothing any more
                raise KilledError
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "rmdir", "unlink"):
            patch.setattr(os, name, unless_dead(getattr(os, name)))
        with suppress(KilledError):
            save_checkpoint(nn.Linear(2, 2), tmp_path / "step", {"step": 2}, {})
    assert len(moments) > killed_at or killed_at == 7
    restore_folder(tmp_path / "step")
    assert finished_step(tmp_path / "step").whole()["step"] in (1, 2)
    save_checkpoint(nn.Linear(2, 2), tmp_path / "step", {"step": 3}, {})
    assert finished_step(tmp_path / "step").whole()["step"] == 3
    assert everything_in(tmp_path) == ["model.safetensors", "nufilt.json", "step"]


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (clip, torch.float32),
        (t5, torch.bfloat16),
        (llava, torch.bfloat16),
        (Shared, torch.float32),
    ],
)
def test_a_model_like_it_gets_every_bit_back(tmp_path, make, dtype):
    model = make().to(dtype)
    other = make().to(dtype)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    save_checkpoint(model, tmp_path / "step", {}, {})
    assert not [name for name in everything_in(tmp_path) if name.endswith((".bin", ".pt", ".pth"))]
    load_checkpoint(other, tmp_path / "step")
    loaded = other.state_dict()
    assert all(torch.equal(value, loaded[key]) for key, value in model.state_dict().items())


def test_a_manifest_that_lists_no_files_is_refused_and_not_taken_for_a_whole_checkpoint(tmp_path):
    save_checkpoint(nn.Linear(2, 2), tmp_path / "step", {}, {})
    manifest = read_manifest(tmp_path / "step")
    del manifest["files"]
    with pytest.raises(ValueError, match=r"step': nufilt.json does not list its files; make it ag"):
        verify_files(tmp_path / "step", manifest, "make it again")


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("file", ["../secret", "{folder}/secret"])
def test_a_head_is_no_file_outside_the_folder_whatever_the_manifest_lists(tmp_path, file, listed):
    (tmp_path / "merged").mkdir()
    (tmp_path / "secret").write_text("secret")
    file = file.format(folder=tmp_path)
    manifest = {"heads": {"task": {"file": file, "modules": [], "config": {}}}}
    if listed:
        manifest["files"] = {file: {"size": 6, "sha256": "0" * 64}}
    with pytest.raises(ValueError, match=r"merged' lacks .*secret; fetch it again"):
        read_heads(tmp_path / "merged", manifest)


def with_head(folder, file, **manifest):
    """A merged model with a head in a file."""
    (folder / "heads").mkdir(parents=True)
    head = {"file": file, "modules": ["classifier"], "config": {}}
    write_json(folder / "nufilt.json", {"heads": {"task": head}, **manifest})


@pytest.mark.parametrize(
    "file",
    [
        *("config.json", "model.safetensors", "README.md", "heads/modeling.py", "heads/.py"),
        *("heads/../x.safetensors", "/x.safetensors", "heads/a/b.safetensors"),
        "heads\\x.safetensors",
    ],
)
def test_a_head_that_is_not_in_the_folder_of_heads_is_refused_as_the_manifest_is_read(
    tmp_path, file
):
    with_head(tmp_path / "merged", file)
    with pytest.raises(ValueError, match=r"'heads.task.file': must be heads/NAME.safetensors"):
        read_manifest(tmp_path / "merged")


def test_a_head_that_the_manifest_does_not_list_is_refused(tmp_path):
    folder = tmp_path / "merged"
    with_head(folder, "heads/task.safetensors")
    (folder / "heads" / "task.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"does not list heads/task.safetensors among its files"):
        read_heads(folder, read_manifest(folder))


def test_a_head_that_is_a_link_out_of_the_folder_is_refused_though_its_digest_is_listed(tmp_path):
    folder = tmp_path / "merged"
    secret = tmp_path / "secret"
    secret.write_text("secret")
    fingerprint = {"size": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    with_head(folder, "heads/task.safetensors", files={"heads/task.safetensors": fingerprint})
    head = folder / "heads" / "task.safetensors"
    head.symlink_to(secret)
    with pytest.raises(ValueError, match=r"heads/task.safetensors is a link out of the folder"):
        read_heads(folder, read_manifest(folder))
    # In the hub's cache, every file is a link to where its content is.
    cached = tmp_path / "models--owner--merged" / "snapshots" / "commit"
    cached.parent.mkdir(parents=True)
    folder.rename(cached)
    blob = tmp_path / "models--owner--merged" / "blobs" / "secret"
    blob.parent.mkdir()
    secret.rename(blob)
    (cached / "heads" / "task.safetensors").unlink()
    (cached / "heads" / "task.safetensors").symlink_to(blob)
    assert read_heads(cached, read_manifest(cached)) == {"heads/task.safetensors": b"secret"}


@pytest.mark.parametrize("task", ["a" * 255, "é" * 127, "x²", ".hidden", "a=b,c+d", "../up", " "])
def test_the_head_of_a_task_of_any_name_has_a_file_that_is_read_again(tmp_path, task):
    heads = {}
    for _ in range(3):
        add_head(heads, task, ["classifier"], {})
    assert len({head["file"] for head in heads.values()}) == 3
    for head in heads.values():
        file = tmp_path / head["file"]
        file.parent.mkdir(exist_ok=True)
        save_file({}, file)
    write_manifest(tmp_path, {"heads": heads})
    assert len(read_heads(tmp_path, read_manifest(tmp_path))) == 3


def test_the_temporary_file_of_a_process_of_another_host_stays(tmp_path, monkeypatch):
    target = tmp_path / "run.json"
    # A number that no process of this host has.
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)
    other = atomic_file(target)
    temporary = other.__enter__()
    monkeypatch.undo()
    temporary.write_text("of the other host")
    write_text(target, "of this host")
    assert target.read_text() == "of this host"
    other.__exit__(None, None, None)
    assert target.read_text() == "of the other host"
    assert everything_in(tmp_path) == ["run.json"]


def test_inputs_are_the_same_or_not_by_what_both_are_known_by():
    files = {"name": "folder", "fingerprint": "1"}
    of_pool = {"name": "a", "fingerprint": "1", "loaded": "2"}
    in_memory = {"name": "b", "loaded": "2"}
    assert is_same_model(files, of_pool) is True
    assert is_same_model(of_pool, in_memory) is True
    assert is_same_model(files, {"name": "c", "loaded": "1"}) is True
    assert is_same_model(files, in_memory) is None
    assert is_same_model(files, {"name": "d", "fingerprint": "3", "loaded": "2"}) is False
    assert is_same_model(in_memory, {"name": "e", "loaded": "4"}) is False
