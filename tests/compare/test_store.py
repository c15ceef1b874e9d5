"""What is kept, what is run again, and what is refused."""

import json

import numpy as np
import pytest

from fusion_bench_nufilt.compare.specs import RunSpec
from fusion_bench_nufilt.compare.store import Store
from tests.compare.helpers import CONFIG, failed, finished

SPEC = RunSpec("my/method", ("method=nufilt",), "nufilt")
SETTINGS = {"modelpool": "p", "resolved": {"models": {"a": "hub/a"}}}


def test_a_finished_run_comes_back_as_it_was(tmp_path):
    run = finished(42, parameters=12, extra_parameters=2)
    store = Store(tmp_path / "new" / "folder", SETTINGS)
    store.save(SPEC, run)
    store.close()
    again = Store(tmp_path / "new" / "folder", SETTINGS).load(SPEC, 42, CONFIG)
    assert again.matrix.tasks == run.matrix.tasks
    np.testing.assert_array_equal(again.matrix.values, run.matrix.values)
    assert (again.merge_seconds, again.environment, again.error) == (run.merge_seconds, run.environment, None)
    assert (again.parameters, again.extra_parameters) == (12, 2)


def test_a_failed_run_and_another_seed_are_to_be_run(tmp_path):
    store = Store(tmp_path, SETTINGS)
    store.save(SPEC, failed(42))
    assert store.load(SPEC, 42, {}) is None
    assert store.load(SPEC, 43, {}) is None


def identified(folder, weights):
    store = Store(folder, SETTINGS)
    try:
        store.identify(weights)
    finally:
        store.close()


def test_results_of_other_weights_are_refused_by_the_name_of_a_model(tmp_path):
    identified(tmp_path, {"_pretrained_": "0", "a": "1"})
    identified(tmp_path, {"_pretrained_": "0", "a": "1"})
    for weights in ({"_pretrained_": "0", "a": "2"}, {"_pretrained_": "0"}):
        with pytest.raises(ValueError, match="holds results of other models: 'a' has other weights there"):
            identified(tmp_path, weights)


def test_results_that_do_not_tell_the_weights_are_refused(tmp_path):
    (tmp_path / "compare.json").write_text(json.dumps(SETTINGS))
    with pytest.raises(ValueError, match=r"was made by an older version.*--overwrite$"):
        identified(tmp_path, {"a": "1"})


def test_results_of_other_settings_are_refused_by_name(tmp_path):
    identified(tmp_path, {})
    with pytest.raises(ValueError, match=r'other settings: resolved.models.a is "hub/a" there and "hub/b" here'):
        Store(tmp_path, {**SETTINGS, "resolved": {"models": {"a": "hub/b"}}})


def test_a_label_with_another_configuration_is_refused(tmp_path):
    store = Store(tmp_path, SETTINGS)
    store.save(SPEC, finished(42))
    with pytest.raises(ValueError, match="results of 'my/method' with other settings: null_rank is 8 there and 9 here"):
        store.load(SPEC, 42, {**CONFIG, "null_rank": 9})


def test_overwriting_starts_again(tmp_path):
    store = Store(tmp_path, SETTINGS)
    store.identify({})
    store.save(SPEC, finished(42))
    store.save_references({"pretrained": {"a": 0.5}})
    store.close()
    store = Store(tmp_path, {"modelpool": "q"}, overwrite=True)
    assert store.load(SPEC, 42, CONFIG) is None
    assert store.load_references() is None


def test_scores_that_are_missing_come_back_as_missing(tmp_path):
    store = Store(tmp_path, SETTINGS)
    store.save_references({"individual": {"a": 0.5, "b": None}})
    assert store.load_references() == {"individual": {"a": 0.5, "b": None}}


def test_a_damaged_file_is_named(tmp_path):
    store = Store(tmp_path, SETTINGS)
    store.save(SPEC, finished(42))
    (file,) = (tmp_path / "runs").rglob("*.json")
    file.write_text(file.read_text()[:20])
    with pytest.raises(ValueError, match=r"42\.json' is damaged"):
        store.load(SPEC, 42, CONFIG)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(ValueError, match="there is a file of that name"):
        Store(tmp_path / "out", SETTINGS)


def test_overwriting_deletes_nothing_where_there_is_no_comparison(tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "1.json").write_text("precious")
    with pytest.raises(ValueError, match=r"has no compare\.json.*is not deleted"):
        Store(tmp_path, SETTINGS, overwrite=True)
    (tmp_path / "compare.json").write_text("[]")
    with pytest.raises(ValueError, match=r"compare\.json' is damaged"):
        Store(tmp_path, SETTINGS, overwrite=True)
    assert (tmp_path / "runs" / "mine" / "1.json").read_text() == "precious"


def test_overwriting_leaves_what_others_put_beside_the_runs(tmp_path):
    store = Store(tmp_path, SETTINGS)
    store.identify({})
    store.save(SPEC, finished(42))
    store.close()
    (tmp_path / "runs" / "notes.txt").write_text("precious")
    Store(tmp_path, SETTINGS, overwrite=True).close()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["notes.txt"]


def test_a_folder_is_held_by_one_comparison_at_a_time(tmp_path):
    store = Store(tmp_path, SETTINGS)
    with pytest.raises(ValueError, match="is writing"):
        Store(tmp_path, SETTINGS)
    store.close()
    Store(tmp_path, SETTINGS).close()


@pytest.mark.parametrize(
    ("field", "value"), [("tasks", ["a"]), ("accuracy_matrix", None), ("error", 3), ("config", [])]
)
def test_a_run_of_another_shape_is_damaged(tmp_path, field, value):
    store = Store(tmp_path, SETTINGS)
    store.save(SPEC, finished(42))
    (file,) = (tmp_path / "runs").rglob("*.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(ValueError, match=r"42\.json' is damaged"):
        store.load(SPEC, 42, CONFIG)
