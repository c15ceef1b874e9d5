"""Files and folders that are whole or not there."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from fusion_bench_nufilt.utils import files
from tests.merge.test_output import begin, write_tensor


def write_file(folder):
    files.write_text(folder / "out", "text")


def write_folder(folder):
    with files.atomic_folder(folder / "out") as draft:
        (draft / "heads").mkdir()
        (draft / "heads" / "task").write_text("text")
        (draft / "model").write_text("text")


def finish_merge(folder):
    with closing(begin(folder)) as output:
        write_tensor(output)
        (output.draft / "config.json").write_text("{}")
        output.finish()


@pytest.mark.parametrize("write", [write_file, write_folder, finish_merge])
def test_what_gets_its_name_is_on_the_disk_before_and_the_name_after(tmp_path, monkeypatch, write):
    events = []
    sync = os.fsync
    replace = os.replace

    def note_sync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def note_replace(draft, target):
        events.append((Path(draft), Path(target)))
        replace(draft, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    write(tmp_path)
    out = tmp_path / "out"
    (moment,) = (
        number
        for number, event in enumerate(events)
        if isinstance(event, tuple) and event[1] == out
    )
    draft = events[moment][0]
    parts = {draft / path.relative_to(out) for path in [out, *out.rglob("*")]}
    assert {str(path) for path in parts} <= set(events[:moment])
    assert str(tmp_path) in events[moment:]


def test_a_folder_that_a_killed_process_began_is_not_foreign(tmp_path):
    for name in (files.LOCK, ".compare.json-123", "moments"):
        (tmp_path / name).touch()
        files.refuse_foreign(tmp_path, "compare.json", ["moments"])
    with pytest.raises(ValueError, match=r"it has 'moments' and no compare\.json"):
        files.refuse_foreign(tmp_path, "compare.json")


@pytest.mark.parametrize("name", ["notes.txt", ".compare.json-123", "moments"])
def test_a_folder_of_somebody_else_is_foreign(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"it has '.*' and no compare\.json"):
        files.refuse_foreign(tmp_path, "compare.json", ["moments"])


@pytest.mark.parametrize("out", ["file", "file/out", "file/new/out"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, out):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"'.*file' is no folder that can be written to"):
        files.refuse_foreign(tmp_path / out, "compare.json")
    files.refuse_foreign(tmp_path / "new" / "out", "compare.json")
    assert not (tmp_path / "new").exists()
