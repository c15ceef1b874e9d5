"""A run that is killed or disturbed leaves nothing that looks finished, and goes on where it
stopped.
"""

import errno
import json
import os
import resource
import shutil
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fusion_bench_nufilt.merge import merge_folders
from fusion_bench_nufilt.merge.output import Output, work_folder
from fusion_bench_nufilt.methods.nufilt import Nufilt
from fusion_bench_nufilt.utils.manifest import read_manifest, verify_files
from tests.merge.helpers import (
    change_json,
    hashes,
    interrupt,
    merge,
    plan,
    same,
    save_stream,
    tensors,
)
from tests.tiny_models import llama

#: A tiny Llama has seven in each of two blocks.
LAYERS = 14


def written_by_param(stream):
    """The ranges of bytes that an interrupted merge has written, of each tensor."""
    journal = (work_folder(stream / "out") / "journal.jsonl").read_text().splitlines()
    records = [json.loads(line.partition(" ")[2]) for line in journal[1:]]
    return {record["param"]: record["written"] for record in records}


def layers_left(stream):
    """How many layers an interrupted merge has yet to compute."""
    return LAYERS - sum("_proj" in param for param in written_by_param(stream))


def count_layers(monkeypatch):
    """Names of the layers that are computed from now on."""
    computed = []
    update = Nufilt.update

    def counted(self, *args):
        computed.extend(self.names)
        return update(self, *args)

    monkeypatch.setattr(Nufilt, "update", counted)
    return computed


def test_what_is_finished_is_not_computed_again(stream, monkeypatch):
    assert interrupt(stream) >= 8
    left = layers_left(stream)
    assert 0 < left < LAYERS
    computed = count_layers(monkeypatch)
    merge(stream)
    assert len(set(computed)) == left


def test_what_is_finished_but_damaged_is_computed_again(stream, monkeypatch):
    expected = hashes(merge(stream, out="expected"))
    interrupt(stream)
    left = layers_left(stream)
    written = written_by_param(stream)
    first = next(param for param in written if "_proj" in param)
    file, start, _, _ = written[first][0]
    with open(work_folder(stream / "out") / "model" / file, "r+b") as damaged:
        damaged.seek(start)
        damaged.write(b"\xff" * 8)
    computed = count_layers(monkeypatch)
    out = merge(stream)
    assert hashes(out) == expected
    assert len(set(computed)) == left + 1
    verify_files(out, read_manifest(out), "")


def test_a_disk_too_full_for_the_journal_loses_nothing(stream, monkeypatch):
    interrupt(stream)
    left = layers_left(stream)
    write_text = Path.write_text

    def full(path, text, **options):
        write_text(path, text[:100], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ValueError, match=r"no room left on the disk for '.*out'"):
        merge(stream)
    monkeypatch.setattr(Path, "write_text", write_text)
    computed = count_layers(monkeypatch)
    merge(stream)
    assert len(set(computed)) == left


def test_the_largest_tensors_are_made_first(stream, note_calls):
    """In another order, blocks of memory fit into none that were freed: a sum took a third more."""
    order = note_calls(Output, "record", lambda _, entry: entry["param"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # or those of one size could change their places
    try:
        out = merge(stream)
    finally:
        torch.set_num_threads(threads)
    sizes = [tensors(out)[key].nbytes for key in order]
    assert sizes == sorted(sizes, reverse=True)


def touch(folder):
    for path in folder.rglob("*"):
        os.utime(path, ns=(0, 10**18))


def test_a_touched_input_has_a_run_begun_again_with_a_line_and_a_finished_result_stays_finished(
    stream, monkeypatch, caplog
):
    expected = tensors(merge(stream, out="expected"))
    interrupt(stream)
    touch(stream / "task3")
    computed = count_layers(monkeypatch)
    assert same(tensors(merge(stream)), expected)
    assert len(set(computed)) == LAYERS
    assert "starting anew: 'task3' has another size or time than when '" in caplog.text
    computed.clear()
    caplog.clear()
    touch(stream / "task2")
    merge(stream)
    assert computed == []
    assert "'task2' has another size or time than when '" in caplog.text


def test_a_finished_result_of_other_settings_or_inputs_is_refused_by_what_differs(stream):
    merge(stream)
    with pytest.raises(ValueError, match=r"out' exists: settings.null_rank is 6 there and 5 here"):
        merge(stream, null_rank=5)
    with pytest.raises(ValueError, match=r'out. exists: .*name is "task2" there and "task3" here'):
        merge(stream, ["task1", "task3", "task2"])
    change_json(stream / "task2" / "config.json", rope_theta=1e6)
    with pytest.raises(ValueError, match=r"inputs\.task 1\.files\.config\.json.* is not the same"):
        merge(stream)


def test_a_finished_run_asked_for_again_is_finished(stream, monkeypatch):
    (merge(stream) / "README.md").write_text("# Mine")  # a card may be edited
    expected = hashes(stream / "out")
    work_folder(stream / "out").mkdir()  # killed after the rename, before it cleaned up
    computed = count_layers(monkeypatch)
    assert hashes(merge(stream)) == expected
    assert computed == []
    assert not work_folder(stream / "out").exists()


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip_a_bit, Path.unlink])
@pytest.mark.parametrize("file", ["model-00003-of-", "config.json"])
def test_a_finished_result_that_is_not_whole_is_refused_and_made_again_once_it_is_removed(
    stream, damage, file
):
    expected = hashes(merge(stream))
    (damaged,) = (stream / "out").glob(f"{file}*")
    damage(damaged)
    before = sorted((stream / "out").iterdir())
    with pytest.raises(ValueError, match=rf"{damaged.name}.*; remove it, and the same command"):
        merge(stream)
    assert sorted((stream / "out").iterdir()) == before
    shutil.rmtree(stream / "out")
    assert hashes(merge(stream)) == expected


def test_without_digests_a_finished_result_is_verified_by_sizes(stream):
    out = merge(stream)
    flip_a_bit(out / "config.json")
    assert merge(stream, settings={"verify": False}) == out
    cut(out / "config.json")
    with pytest.raises(ValueError, match=r"config.json is not what was saved \(its size differs\)"):
        merge(stream, settings={"verify": False})


def test_more_files_than_a_process_may_have_open_are_merged(tmp_path):
    save_stream(tmp_path, llama(), shards="1KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) == 16
    merge(tmp_path, out="warm")  # what is opened once and for all
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    now_open = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (now_open + 12, limits[1]))
        merge(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def refuse_late(stream, message):
    with pytest.raises(ValueError, match=message):
        merge(stream)
    assert not (stream / "out").exists()


def set_room_on_disk(monkeypatch, free):
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)


def test_no_room_on_the_disk(stream, monkeypatch):
    set_room_on_disk(monkeypatch, 1000)
    refuse_late(stream, r"the result takes 0\.\d MB and '.*' has 0\.0 MB left")
    assert not work_folder(stream / "out").exists()


def test_what_an_interrupted_run_wrote_needs_no_room_again(stream, monkeypatch):
    interrupt(stream)
    files = work_folder(stream / "out").rglob("*.safetensors")
    written = sum(512 * path.stat().st_blocks for path in files)
    needed = plan(stream).disk_bytes
    assert written > 0
    set_room_on_disk(monkeypatch, max(0, needed - written))
    merge(stream)


def test_a_disk_that_fills_up_half_way_is_said_and_the_run_goes_on_from_there(stream, monkeypatch):
    expected = hashes(merge(stream, out="expected"))
    written = []
    pwrite = os.pwrite

    def full_after_ten(descriptor, data, offset):
        written.append(offset)
        if len(written) > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full_after_ten)
    refuse_late(stream, "no room left on the disk.*run the same command again")
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert hashes(merge(stream)) == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_when_a_callback_fails_no_thread_writes_after_the_lock_is_released(
    stream, monkeypatch, error
):
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    releases = []
    late_writes = []
    close = Output.close
    write = Output.write

    def noted_close(self):
        close(self)
        releases.append(self)

    def noted_write(self, *arguments):
        time.sleep(0.01)  # other threads are at work while the callback fails
        late_writes.extend(releases)
        write(self, *arguments)

    monkeypatch.setattr(Output, "close", noted_close)
    monkeypatch.setattr(Output, "write", noted_write)

    def fail(done, total):
        raise error

    try:
        # The traceback that this keeps holds all that was under way.
        with pytest.raises(error) as raised:
            merge_folders(plan(stream), stream / "out", fail)
        time.sleep(0.2)
        assert releases
        assert not late_writes
        del raised
    finally:
        torch.set_num_threads(threads)


def test_a_task_that_is_removed_during_the_run_is_named_and_the_run_goes_on_once_it_is_back(
    stream, monkeypatch
):
    expected = hashes(merge(stream, out="expected"))
    update = Nufilt.update

    def remove_and_update(*args, **kwargs):
        with suppress(FileNotFoundError):  # layers are merged side by side: one of them is first
            (stream / "task3").rename(stream / "away")
        return update(*args, **kwargs)

    monkeypatch.setattr(Nufilt, "update", remove_and_update)
    refuse_late(stream, r"task3/model.safetensors' can't be read: No such file.*goes on")
    monkeypatch.undo()
    (stream / "away").rename(stream / "task3")
    assert hashes(merge(stream)) == expected


def test_the_longest_name_that_has_room_for_the_work_folder_is_taken(stream):
    merge(stream, out=247 * "x")
