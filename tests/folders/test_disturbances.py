"""A merge whose inputs or disk change while it runs leaves nothing that looks finished."""

import errno
import os

import pytest

from fusion_bench_nufilt.methods import nufilt
from tests.folders.helpers import hashes, merge, save_stream
from tests.models import llama


@pytest.fixture
def stream(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    return tmp_path


def refuse_late(stream, message):
    with pytest.raises(ValueError, match=message):
        merge(stream, ["task1", "task2"])
    assert not (stream / "out").exists()


def test_an_input_that_is_written_to_during_the_run(stream, monkeypatch):
    fuse = nufilt.fuse_each

    def overwrite_and_fuse(*args, **kwargs):
        with (stream / "task2" / "model.safetensors").open("r+b") as file:  # in place: another thread may be reading
            file.seek(-64, os.SEEK_END)
            file.write(bytes(64))
        return fuse(*args, **kwargs)

    monkeypatch.setattr(nufilt, "fuse_each", overwrite_and_fuse)
    refuse_late(stream, "task2' was changed during the run")


def test_no_room_on_the_disk(stream, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    refuse_late(stream, r"the result takes 0\.0 GB and '.*' has 0\.0 GB left")


def test_a_disk_that_fills_up_half_way_is_said_and_the_run_goes_on_from_there(stream, monkeypatch):
    expected = hashes(merge(stream, ["task1", "task2"], "expected"))
    written, pwrite = [], os.pwrite

    def full_after_ten(descriptor, data, offset):
        written.append(offset)
        if len(written) > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full_after_ten)
    refuse_late(stream, "no room left on the disk.*run the same command again")
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert hashes(merge(stream, ["task1", "task2"])) == expected
