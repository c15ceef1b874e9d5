"""A file is digested while it grows, and its digest is that of what is on the disk."""

import errno
import gc
import hashlib
import os
from concurrent.futures import Future
from threading import Barrier

import pytest

from fusion_bench_nufilt.merge import digests
from fusion_bench_nufilt.merge.digests import GrowingFiles

PARTS = [(0, 3), (3, 3), (3, 600_000), (600_000, 600_001), (600_001, 1_000_000)]


@pytest.fixture
def content(tmp_path):
    """Random bytes, of which nothing is on the disk yet."""
    data = os.urandom(1_000_000)
    (tmp_path / "file").write_bytes(bytes(len(data)))
    return data


@pytest.fixture
def growing(tmp_path):
    """A file that grows."""
    files = GrowingFiles(tmp_path, ["file"])
    yield files
    files.close()


def write(path, content, start, stop):
    with path.open("r+b") as stream:
        stream.seek(start)
        stream.write(content[start:stop])


def digested_so_far(growing):
    """The number of bytes that are digested once all jobs are done."""
    # Every thread is here at a time, and so none at a job from before.
    barrier = Barrier(digests._THREADS)
    for here in [growing._pool.submit(barrier.wait) for _ in range(digests._THREADS)]:
        here.result(30)
    return growing._files["file"]._digested


@pytest.mark.parametrize("parts", [PARTS, PARTS[::-1], [*PARTS[2:], *PARTS[:2]]], ids=str)
def test_parts_written_in_any_order_have_the_digest_of_the_whole(tmp_path, growing, content, parts):
    for start, stop in parts:
        write(tmp_path / "file", content, start, stop)
        growing.add("file", start, stop)
    fingerprint = growing.fingerprints()["file"]
    assert fingerprint == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_what_follows_a_part_that_is_not_written_is_digested_once_it_is(tmp_path, growing, content):
    write(tmp_path / "file", content, 0, 3)
    growing.add("file", 0, 3)
    growing.add("file", 600_000, 1_000_000)
    assert digested_so_far(growing) == 3
    write(tmp_path / "file", content, 0, len(content))
    growing.add("file", 3, 600_000)
    assert digested_so_far(growing) == len(content)
    assert growing.fingerprints()["file"]["sha256"] == hashlib.sha256(content).hexdigest()


def test_a_file_that_ends_too_early_is_refused(tmp_path, growing):
    (tmp_path / "file").write_bytes(b"123")
    growing.add("file", 0, 4)
    with pytest.raises(ValueError, match="file' was cut short while it was written"):
        growing.fingerprints()


def test_what_is_written_is_brought_to_the_disk_wherever_it_stands(
    tmp_path, growing, content, monkeypatch
):
    """The largest tensors are made first, and what stands first may be small."""
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(digests, "_SYNCED_BYTES", 1000)
    growing.add("file", 600_000, 600_900)
    assert digested_so_far(growing) == 0
    assert not synced
    growing.add("file", 800_000, 800_100)
    assert digested_so_far(growing) == 0
    assert len(synced) == 1


def test_a_disk_that_fails_ahead_of_the_end_is_said_at_the_end(
    tmp_path, growing, content, monkeypatch
):
    """The system says it once."""

    def fail_once(descriptor):
        monkeypatch.undo()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail_once)
    monkeypatch.setattr(digests, "_SYNCED_BYTES", 2)
    growing.add("file", 0, 3)
    digested_so_far(growing)
    with pytest.raises(OSError, match="Input/output error"):
        growing.fingerprints()


def test_nothing_stays_of_a_job_that_is_done(tmp_path, growing, content):
    """A few hundred bytes of each lay in the room of a layer that was freed: a sum took 0.9 GB."""
    before = count_jobs()
    write(tmp_path / "file", content, 0, len(content))
    for start in range(0, len(content), 10_000):
        growing.add("file", start, start + 10_000)
    assert digested_so_far(growing) == len(content)
    assert count_jobs() == before


def count_jobs():
    return sum(isinstance(value, Future) for value in gc.get_objects())
