"""Files and folders that are whole or not there, on systems of every kind."""

import os

import pytest

from fusion_bench_nufilt.utils import files


@pytest.mark.parametrize("system", ["posix", "nt"])
def test_a_folder_is_flushed_as_the_system_can(system, tmp_path, monkeypatch):
    """Windows flushes no folder, and no file that was opened for reading."""
    opened = []
    real_open = os.open

    def noted_open(path, flags, *args):
        opened.append((path, flags))
        return real_open(path, flags, *args)

    def flush(descriptor):
        path, flags = opened[-1]
        if system == "nt":
            assert path.is_file()
            assert flags & os.O_RDWR

    monkeypatch.setattr(files.os, "name", system)
    monkeypatch.setattr(files.os, "open", noted_open)
    monkeypatch.setattr(files.os, "fsync", flush)
    (tmp_path / "file").write_text("text")
    for path in (tmp_path, tmp_path / "file"):
        files.sync(path)
    monkeypatch.undo()
    flushed = {"posix": 2, "nt": 1}
    assert len(opened) == flushed[system]
