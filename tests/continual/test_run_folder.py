"""A log directory belongs to one run at a time, and what is damaged in it is made again."""

import json
import shutil

import pytest
from torch import nn

from fusion_bench_nufilt.continual.run_folder import RunFolder, open_run_folder
from fusion_bench_nufilt.utils.files import MANIFEST, lock_folder
from tests.continual.helpers import InterruptedRunError, contents, interrupt_after, pool
from tests.continual.test_resume import algorithm_in

RUN = {
    "method": "NUFILT",
    "order": ["a", "b"],
    "inputs": {"a": {"fingerprint": "1" * 64, "loaded": "1" * 64}},
    "settings": {"seed": 42},
}
ABOUT = {"step": 1, "tasks": ["a"], "merge_seconds": [0.1], **RUN}


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "logs")
    folder.save_step(1, nn.Linear(2, 2), ABOUT, {}, {})
    return folder


def test_a_file_in_place_of_the_log_directory_is_refused_by_its_name(tmp_path):
    (tmp_path / "log").touch()
    with (
        pytest.raises(ValueError, match=r"^'.*log' can't be a folder: there is a file"),
        open_run_folder(str(tmp_path / "log")),
    ):
        pass


def test_a_second_run_in_a_log_directory_is_refused(tmp_path):
    lock = lock_folder(tmp_path)
    with pytest.raises(ValueError, match=r"another process is writing '.*'"):
        algorithm_in(tmp_path).run(pool(2))
    lock.release()
    algorithm_in(tmp_path).run(pool(2))


def test_files_of_the_user_in_the_log_directory_stay(tmp_path):
    (tmp_path / "write_test").write_text("precious")
    algorithm_in(tmp_path).run(pool(1))
    assert (tmp_path / "write_test").read_text() == "precious"


def test_a_step_of_another_version_is_refused_and_not_overwritten(folder):
    path = folder.path / "checkpoints" / "merged_model_0" / MANIFEST
    old = {key: value for key, value in json.loads(path.read_text()).items() if key not in RUN}
    path.write_text(json.dumps({**old, "run": {"seed": 42}}))
    with pytest.raises(ValueError, match=r'another run: method is null there and "NUFILT" here'):
        folder.begin(RUN)


def test_a_run_that_keeps_no_steps_is_not_overwritten_by_one_with_other_settings(tmp_path):
    with pytest.raises(InterruptedRunError):
        algorithm_in(tmp_path, save_on_every_step=False).run(pool(2), on_step=interrupt_after(1))
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"holds another run: null_rank is 6 there and 5 here"):
        algorithm_in(tmp_path, null_rank=5, save_on_every_step=False).run(pool(2))
    assert contents(tmp_path) == before
    algorithm_in(tmp_path, save_on_every_step=False).run(pool(2))


@pytest.mark.parametrize("content", ["", "[]", '{"a": 3}', '{"a": {', "\x00", "[" * 100_000])
def test_a_damaged_report_is_none(folder, content, caplog):
    (folder.path / "report_0.json").write_text(content)
    assert folder.read_report(1) is None
    assert "report_0.json" in caplog.text
    assert "step 1: " in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "1"),
        ("step", 0),
        ("files", None),
        ("files", {"x": 3}),
        ("inputs", []),
        ("merge_seconds", [None]),
    ],
)
def test_a_damaged_manifest_makes_the_step_again(folder, field, value, caplog):
    path = folder.path / "checkpoints" / "merged_model_0" / MANIFEST
    assert folder.newest_step(1, 1)
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert folder.newest_step(1, 1) is None
    assert f"field '{field}" in caplog.text
    assert "step 1: '" in caplog.text  # whose folder has the number 0


def test_a_folder_without_its_manifest_is_no_step(folder):
    (folder.checkpoint(1) / MANIFEST).unlink()
    with pytest.raises(ValueError, match=f"merged_model_0' is not there, or has no {MANIFEST}"):
        folder.read_step(1)
    assert folder.newest_step(1, 1) is None


@pytest.mark.parametrize(("source", "place"), [(1, 2), (2, 1)])
def test_the_folder_of_another_step_is_passed_over(folder, source, place, caplog):
    folder.save_step(2, nn.Linear(2, 2), {**ABOUT, "step": 2, "tasks": ["a", "b"]}, {}, {})
    shutil.rmtree(folder.checkpoint(place))
    shutil.copytree(folder.checkpoint(source), folder.checkpoint(place))
    with pytest.raises(ValueError, match=rf"' is of step {source}$"):
        folder.read_step(place)
    assert folder.newest_step(place, place) is None
    assert f"is of step {source}; looking for the step before" in caplog.text


def test_scores_of_a_run_before_that_are_damaged_are_none(tmp_path, caplog):
    folder = RunFolder(tmp_path)
    scoring = {"scored": "all", "taskpool": {"tasks": ["a"]}, "test_data": {"a": {"items": 1}}}
    good = {
        "run.json": {**RUN, "scoring": scoring},
        "accuracy_matrix.json": {"tasks": ["a"], "accuracy_matrix": [[0.5]]},
    }

    def write(contents):
        for name, content in contents.items():
            (tmp_path / name).write_text(json.dumps(content))

    write(good)
    assert folder.finished_scores(scoring).metrics()["ACC"] == 0.5
    more = {**scoring, "taskpool": {"tasks": ["a", "b"]}, "test_data": {"a": {"items": 1}, "b": 2}}
    assert folder.finished_scores(more).metrics()["ACC"] == 0.5
    assert folder.finished_scores({**scoring, "test_data": {"a": {"items": 2}}}) is None
    assert caplog.text == ""
    for damaged in (
        {"run.json": {"scoring": {"taskpool": 3, "test_data": {}}}},
        {"run.json": {"scoring": {"taskpool": {}}}},
        {"accuracy_matrix.json": {"tasks": ["a"], "accuracy_matrix": [[0.5, 1]]}},
        {"accuracy_matrix.json": [3]},
    ):
        write({**good, **damaged})
        assert folder.finished_scores(scoring) is None
    assert caplog.text.count("WARNING") == 4
