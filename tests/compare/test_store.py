"""What is kept, what is run again, and what is refused."""

import json

import numpy as np
import pytest

from fusion_bench_nufilt.compare import RunSpec
from fusion_bench_nufilt.compare.store import Store
from tests.compare.helpers import CONFIG, failed, finished

SPEC = RunSpec("my/method", ("method=nufilt",))
SETTINGS = {"modelpool": "p", "resolved": {"models": {"a": "hub/a"}}}


def test_a_finished_run_comes_back_as_it_was(tmp_path):
    run = finished(42)
    Store(tmp_path / "new" / "folder", SETTINGS).save(SPEC, run)
    again = Store(tmp_path / "new" / "folder", SETTINGS).load(SPEC, 42, CONFIG)
    assert again.matrix.tasks == run.matrix.tasks
    np.testing.assert_array_equal(again.matrix.values, run.matrix.values)
    assert (again.merge_seconds, again.environment, again.error) == (run.merge_seconds, run.environment, None)


def test_a_failed_run_and_another_seed_are_to_be_run(tmp_path):
    store = Store(tmp_path, SETTINGS)
    store.save(SPEC, failed(42))
    assert store.load(SPEC, 42, {}) is None
    assert store.load(SPEC, 43, {}) is None


def test_results_of_other_settings_are_refused_by_name(tmp_path):
    Store(tmp_path, SETTINGS)
    with pytest.raises(ValueError, match=r'other settings: resolved.models.a is "hub/a" there and "hub/b" here'):
        Store(tmp_path, {**SETTINGS, "resolved": {"models": {"a": "hub/b"}}})


def test_a_label_with_another_configuration_is_refused(tmp_path):
    store = Store(tmp_path, SETTINGS)
    store.save(SPEC, finished(42))
    with pytest.raises(ValueError, match="results of 'my/method' with other settings: null_rank is 8 there and 9 here"):
        store.load(SPEC, 42, {**CONFIG, "null_rank": 9})


def test_overwriting_starts_again(tmp_path):
    store = Store(tmp_path, SETTINGS)
    store.save(SPEC, finished(42))
    store.save_references({"pretrained": {"a": 0.5}})
    store = Store(tmp_path, {"modelpool": "q"}, overwrite=True)
    assert store.load(SPEC, 42, CONFIG) is None
    assert store.load_references() is None


def test_scores_that_are_missing_survive_json(tmp_path):
    store = Store(tmp_path, SETTINGS)
    store.save_references({"individual": {"a": 0.5, "b": float("nan")}})
    assert np.isnan(store.load_references()["individual"]["b"])
    assert json.loads((tmp_path / "references.json").read_text()) == {"individual": {"a": 0.5, "b": None}}


def test_a_damaged_file_is_named(tmp_path):
    store = Store(tmp_path, SETTINGS)
    store.save(SPEC, finished(42))
    (file,) = (tmp_path / "runs").rglob("*.json")
    file.write_text(file.read_text()[:20])
    with pytest.raises(ValueError, match=r"42\.json is damaged"):
        store.load(SPEC, 42, CONFIG)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(ValueError, match="there is a file of that name"):
        Store(tmp_path / "out", SETTINGS)
