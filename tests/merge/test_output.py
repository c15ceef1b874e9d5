"""The work folder beside the result is ours if it is a real folder of this user with our lock."""

import hashlib
import json
import os
import shutil
import sys
import zlib
from contextlib import closing

import pytest

from fusion_bench_nufilt.merge.output import Output, clear_work_folder, work_folder
from fusion_bench_nufilt.utils.manifest import STATE_FILE
from fusion_bench_nufilt.utils.tensors import TensorInfo, make_header

TENSOR = b"12345678"
CHECKSUM = zlib.crc32(TENSOR)
HEADER = make_header({"w": TensorInfo("", "U8", (8,), 0, 8)})
START = len(HEADER)
STOP = START + 8
HEADERS = {"model.safetensors": HEADER}


def begin(folder, seed=1, content="0", time=1, headers=HEADERS):
    stamps = {"model.safetensors": [14, time]}
    base = {"name": "base", "fingerprint": content * 64, "stamps": stamps, "files": {}}
    inputs = {"base": base}
    run = {"settings": {"seed": seed}, "inputs": inputs}
    return Output(folder / "out", run, headers)


def write_tensor(output):
    output.write("model.safetensors", memoryview(TENSOR), START)
    written = [("model.safetensors", START, STOP, CHECKSUM)]
    output.record({"param": "w", "written": written, "reports": []})


def test_a_link_in_place_of_the_work_folder_is_not_followed(tmp_path):
    precious = tmp_path / "victim" / "model" / "model.safetensors"
    precious.parent.mkdir(parents=True)
    precious.write_text("precious")
    (tmp_path / ".out.nufilt").symlink_to(tmp_path / "victim")
    with pytest.raises(ValueError, match="is a file or a link: remove it"):
        begin(tmp_path)
    clear_work_folder(tmp_path / "out")
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("file", ["notes.txt", "journal.jsonl", "model/model.safetensors"])
def test_a_folder_without_our_lock_is_not_ours_and_stays_as_it_is(tmp_path, file):
    work = work_folder(tmp_path / "out")
    path = work / file
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    before = work.stat().st_mode
    with pytest.raises(ValueError, match=r"was not made by nufilt: move it away"):
        begin(tmp_path)
    clear_work_folder(tmp_path / "out")
    assert path.read_text() == "precious"
    assert work.stat().st_mode == before
    assert [each for each in work.rglob("*") if each.is_file()] == [path]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "nufilt_state", ""])
def test_a_link_in_the_work_folder_is_removed_and_not_followed(tmp_path, name):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "model.safetensors").write_text("precious")
    with closing(begin(tmp_path)) as output:
        write_tensor(output)
        path = output.draft / name
    if name == "":
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    target = victim
    if name == "model.safetensors":
        target = victim / name
    path.symlink_to(target)
    with closing(begin(tmp_path)) as output:
        assert not path.is_symlink()
        write_tensor(output)
        output.finish()
    assert (victim / "model.safetensors").read_text() == "precious"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == HEADER + TENSOR


def test_what_a_process_had_written_beside_the_weights_when_it_was_killed_is_in_no_result(tmp_path):
    with closing(begin(tmp_path)) as output:
        write_tensor(output)
        for name in ("config.json", ".nufilt.json-123", "heads/task.safetensors"):
            (output.draft / name).parent.mkdir(exist_ok=True)
            (output.draft / name).touch()
    with closing(begin(tmp_path)) as output:
        assert list(output.done) == ["w"]
        output.finish()
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert [path.name for path in files] == ["model.safetensors"]
    assert not work_folder(tmp_path / "out").exists()


def test_a_work_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    work_folder(tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ValueError, match="belongs to another user"):
        begin(tmp_path)


def test_nobody_else_can_write_into_the_work_folder(tmp_path):
    work_folder(tmp_path / "out").mkdir(mode=0o777)
    with closing(begin(tmp_path)) as output:
        assert output.work.stat().st_mode & 0o777 == 0o700


def test_files_of_a_run_with_another_base_are_in_no_result(tmp_path):
    other = {"other.safetensors": HEADER}
    with closing(Output(tmp_path / "out", {}, other)) as output:
        (output.draft / "vocab.txt").touch()  # killed before it took its name
    with closing(begin(tmp_path)) as output:
        assert sorted(path.name for path in output.draft.iterdir()) == ["model.safetensors"]


def test_a_second_process_is_refused(tmp_path):
    with closing(begin(tmp_path)), pytest.raises(ValueError, match="another process is writing"):
        begin(tmp_path)


def test_a_kill_while_the_lock_is_taken_does_not_block_the_next_run(tmp_path):
    work = work_folder(tmp_path / "out")
    work.mkdir()  # killed before there was a lock
    begin(tmp_path).close()
    (work / "journal.jsonl").unlink()  # before there was a journal
    with closing(begin(tmp_path)) as output:
        write_tensor(output)
        output.finish()
    assert not work.exists()


def test_a_result_that_another_process_finished_meanwhile_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="was made by another process meanwhile"):
        begin(tmp_path)
    assert not work_folder(tmp_path / "out").exists()


def test_what_is_done_is_known_again_and_a_journal_whose_words_were_changed_is_not_believed(
    tmp_path,
):
    with closing(begin(tmp_path)) as output:
        write_tensor(output)
    with closing(begin(tmp_path)) as output:
        assert list(output.done) == ["w"]
    journal = work_folder(tmp_path / "out") / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"param": "w"', '"param": "x"'))
    with closing(begin(tmp_path)) as output:
        assert output.done == {}


@pytest.mark.parametrize(
    "change",
    [
        {"written": []},
        {"written": [["model.safetensors", START, STOP]]},
        {"written": [["model.safetensors", -6, STOP, 0]]},
        {"written": [["model.safetensors", START, 2**70, 0]]},
        {"written": [["../../secret", 0, 1, 0]]},
        {"param": None},
        {"reports": [3]},
        {"not_finite": 2.7},
    ],
    ids=str,
)
def test_a_journal_of_another_form_is_not_believed(tmp_path, change):
    with closing(begin(tmp_path)) as output:
        write_tensor(output)
    journal = work_folder(tmp_path / "out") / "journal.jsonl"
    head, line = journal.read_text().splitlines()
    text = json.dumps({**json.loads(line.partition(" ")[2]), **change})
    journal.write_text(f"{head}\n{hashlib.sha256(text.encode()).hexdigest()[:16]} {text}\n")
    with closing(begin(tmp_path)) as output:
        assert output.done == {}


def test_an_output_that_was_closed_is_not_written_to(tmp_path):
    output = begin(tmp_path)
    output.close()
    with pytest.raises(ValueError, match=r"no longer locked by this run.*not written"):
        write_tensor(output)


def test_finishing_leaves_what_others_put_there(tmp_path):
    with closing(begin(tmp_path)) as output:
        write_tensor(output)
        (output.work / "notes.txt").write_text("precious")  # while it ran
        output.finish()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == HEADER + TENSOR
    assert [path.name for path in work_folder(tmp_path / "out").iterdir()] == ["notes.txt"]


def test_why_a_run_starts_anew_is_said(tmp_path, caplog):
    caplog.set_level("INFO")
    with closing(begin(tmp_path, seed=1)) as output:
        write_tensor(output)
    with closing(begin(tmp_path, seed=2)) as output:
        assert output.done == {}
    assert "out' was begun otherwise: settings.seed is 1 there and 2 here" in caplog.text


def test_tensors_that_have_another_place_in_the_files_are_made_again(tmp_path):
    with closing(begin(tmp_path)) as output:
        write_tensor(output)
    headers = {"model.safetensors": HEADER.replace(b"w", b"x")}
    with closing(begin(tmp_path, headers=headers)) as output:
        assert output.done == {}


@pytest.mark.parametrize("change", [{"content": "9"}, {"time": 2}], ids=str)
def test_what_was_made_of_inputs_of_another_content_or_time_is_made_again(tmp_path, change):
    with closing(begin(tmp_path)) as output:
        write_tensor(output)
    with closing(begin(tmp_path, **change)) as output:
        assert output.done == {}


def test_the_sums_of_a_file_are_those_of_its_header_and_its_tensors(tmp_path):
    with closing(begin(tmp_path)) as output:
        write_tensor(output)
        (fingerprint,) = output.fingerprints().values()
    assert fingerprint == {
        "size": STOP,
        "checksums": [[0, START, zlib.crc32(HEADER)], [START, STOP, CHECKSUM]],
    }


def test_a_journal_whose_first_line_is_damaged_is_said_to_be(tmp_path, caplog):
    caplog.set_level("INFO")
    with closing(begin(tmp_path)) as output:
        write_tensor(output)
    journal = work_folder(tmp_path / "out") / "journal.jsonl"
    journal.write_text(f"x{journal.read_text()}")
    with closing(begin(tmp_path)) as output:
        assert output.done == {}
    assert "the journal of " in caplog.text
    assert "is damaged" in caplog.text


def test_a_folder_of_the_name_that_was_made_while_the_merge_ran_stays(tmp_path):
    with closing(begin(tmp_path)) as output:
        write_tensor(output)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes.txt").write_text("precious")
        with pytest.raises(OSError, match="not empty"):
            output.finish()
    assert (tmp_path / "out" / "notes.txt").read_text() == "precious"


@pytest.mark.skipif(sys.platform != "linux", reason="others are not asked")
def test_the_state_alone_does_not_stay_in_memory_if_the_system_takes_advice(tmp_path, monkeypatch):
    given_back = []

    def advise(descriptor, *advice):
        given_back.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        raise OSError

    with closing(begin(tmp_path, headers={**HEADERS, STATE_FILE: HEADER})) as output:
        monkeypatch.setattr(os, "posix_fadvise", advise)
        for file in ("model.safetensors", STATE_FILE):
            output.write(file, memoryview(TENSOR), START)
        assert given_back == [str(output.draft / STATE_FILE)]
