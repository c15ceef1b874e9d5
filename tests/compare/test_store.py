"""What is kept, what is run again, and what is refused."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from fusion_bench_nufilt.compare import store as store_module
from fusion_bench_nufilt.compare.specs import RunSpec
from fusion_bench_nufilt.compare.store import Store
from fusion_bench_nufilt.continual import task_order
from fusion_bench_nufilt.utils.files import refuse_foreign
from tests.compare.helpers import TASKS, failed, finished

SPEC = RunSpec("my/method", ("method=nufilt",), "nufilt")
SETTINGS = {"modelpool": "p", "resolved": {"models": {"a": "hub/a"}}}
RUN = finished(42, parameters=12, extra_parameters=2)


def load(store, config):
    return store.load(SPEC, config, task_order(TASKS, shuffle=True, seed=config["seed"]))


@pytest.fixture
def store(tmp_path):
    with closing(Store(tmp_path / "new" / "folder", SETTINGS)) as store:
        store.save(SPEC, RUN)
        yield store


def test_a_finished_run_comes_back_as_it_was(store):
    again = load(store, RUN.config)
    assert again == RUN
    np.testing.assert_array_equal(again.matrix.values, RUN.matrix.values)


def test_a_failed_run_and_another_seed_are_to_be_run(store):
    store.save(SPEC, failed(43))
    assert load(store, failed(43).config) is None
    assert load(store, finished(44).config) is None


def identified(folder, weights):
    with closing(Store(folder, SETTINGS)) as store:
        store.identify(weights)


def test_results_of_other_weights_are_refused_by_the_name_of_a_model(tmp_path):
    identified(tmp_path, {"_pretrained_": "0", "a": "1"})
    identified(tmp_path, {"_pretrained_": "0", "a": "1"})
    for weights in ({"_pretrained_": "0", "a": "2"}, {"_pretrained_": "0"}):
        with pytest.raises(
            ValueError, match="holds results of other models: 'a' has other weights there"
        ):
            identified(tmp_path, weights)


def test_results_that_do_not_tell_the_weights_are_refused(tmp_path):
    (tmp_path / "compare.json").write_text(json.dumps(SETTINGS))
    with pytest.raises(ValueError, match="is damaged, field 'weights': field required"):
        identified(tmp_path, {"a": "1"})


def test_results_of_other_settings_are_refused_by_name(tmp_path):
    identified(tmp_path, {})
    with pytest.raises(
        ValueError, match=r'other settings: resolved.models.a is "hub/a" there and "hub/b" here'
    ):
        Store(tmp_path, {**SETTINGS, "resolved": {"models": {"a": "hub/b"}}})


def test_a_label_with_another_configuration_is_refused(store):
    with pytest.raises(
        ValueError,
        match="results of 'my/method' with other settings: null_rank is 8 there and 9 here",
    ):
        load(store, {**RUN.config, "null_rank": 9})


def test_options_of_the_run_alone_are_not_compared(store):
    config = {**RUN.config, "verify": False, "devices": [1], "check_models": False}
    assert load(store, config) == RUN


def test_scores_of_single_models_come_back_with_those_that_are_missing(store):
    scores = {"pretrained": {"a": 0.1, "b": 0.2}, "individual": {"a": 0.5, "b": None}}
    store.save_references(scores)
    assert store.load_references(["a", "b"]) == scores


@pytest.mark.parametrize(
    "scores",
    [
        {},
        {"pretrained": {"a": 0.1}},
        {"pretrained": {"a": 0.1}, "individual": {}},
        {"individual": {"b": 1.0}},
    ],
)
def test_scores_of_single_models_that_are_not_of_all_tasks_are_refused(store, scores):
    store.save_references(scores)
    with pytest.raises(
        ValueError,
        match=r"references\.json' is damaged, field '(pretrained|individual)': must have",
    ):
        store.load_references(["a"])


def test_a_score_that_is_none_and_tasks_in_another_order_are_refused(store):
    (file,) = (store.folder / "runs").rglob("*.json")
    good = json.loads(file.read_text())
    matrix = [[1e308, None, None], *good["accuracy_matrix"][1:]]
    edits = {
        "'tasks'": {"tasks": good["tasks"][::-1]},
        "'accuracy_matrix.0.0'": {"accuracy_matrix": matrix},
    }
    for field, edit in edits.items():
        file.write_text(json.dumps({**good, **edit}))
        with pytest.raises(ValueError, match=rf"42\.json' is damaged, field {field}"):
            load(store, RUN.config)


def test_overwriting_starts_again_and_leaves_what_others_put_beside_the_runs(store):
    store.identify({})
    store.save_references({"pretrained": {"a": 0.5}})
    store.close()
    (store.folder / "runs" / "notes.txt").write_text("precious")
    with closing(Store(store.folder, {"modelpool": "q"}, overwrite=True)) as again:
        assert list(store.folder.rglob("42.json"))  # until the new comparison can begin
        again.identify({})
        assert load(again, RUN.config) is None
        assert again.load_references(["a"]) is None
    assert [path.name for path in (store.folder / "runs").iterdir()] == ["notes.txt"]


def test_overwriting_that_is_killed_at_any_file_is_done_again_by_the_same_command(
    store, monkeypatch
):
    store.identify({})
    store.save_references({"pretrained": {"a": 0.5}})
    store.close()
    calls = {"left": 0}

    def counted(function):
        def call(*arguments, **options):
            if calls["left"] == 0:
                raise KeyboardInterrupt
            calls["left"] -= 1
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    monkeypatch.setattr(Path, "rmdir", counted(Path.rmdir))
    monkeypatch.setattr(store_module.FinishedFile, "keep", counted(store_module.FinishedFile.keep))
    for left in range(20):
        calls["left"] = left
        refuse_foreign(store.folder, "compare.json")  # as the command does
        with closing(Store(store.folder, {"modelpool": "q"}, overwrite=True)) as again:
            try:
                again.identify({})
            except KeyboardInterrupt:
                continue
        break
    assert left > 3  # a run, the references, the folders and compare.json
    assert not list(store.folder.glob("runs/*/*.json"))
    assert json.loads((store.folder / "compare.json").read_text())["modelpool"] == "q"


def test_overwriting_deletes_nothing_where_there_is_no_comparison(tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "1.json").write_text("precious")
    with pytest.raises(ValueError, match=r"has no compare\.json.*is not deleted"):
        Store(tmp_path, SETTINGS, overwrite=True)
    (tmp_path / "compare.json").write_text("[]")
    with pytest.raises(ValueError, match=r"compare\.json' is damaged"):
        Store(tmp_path, SETTINGS, overwrite=True)
    assert (tmp_path / "runs" / "mine" / "1.json").read_text() == "precious"


def test_overwriting_follows_no_link_and_deletes_no_other_json(store, tmp_path):
    store.identify({})
    store.close()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "1.json").write_text('{"label": "a", "seed": 1}')
    runs = store.folder / "runs"
    links = [
        (Path.symlink_to, runs / "link", mine, '{"label": "a", "seed": 1}'),
        (Path.hardlink_to, runs / "my_method" / "1.json", mine / "1.json", '{"a": 1}'),
    ]
    for make, path, target, text in links:
        make(path, target)
        (mine / "1.json").write_text(text)
        with pytest.raises(ValueError, match=r"1\.json' is(, or lies behind, a link| damaged)"):
            Store(store.folder, SETTINGS, overwrite=True)
        path.unlink()
    assert (runs / "my_method" / "42.json").exists()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(ValueError, match="there is a file of that name"):
        Store(tmp_path / "out", SETTINGS)


def test_a_folder_is_held_by_one_comparison_at_a_time(store):
    with pytest.raises(ValueError, match="is writing"):
        Store(store.folder, SETTINGS)
    store.close()
    Store(store.folder, SETTINGS).close()


@pytest.mark.parametrize(
    ("field", "value"),
    [("tasks", ["a"]), ("accuracy_matrix", None), ("error", 3), ("config", []), (None, None)],
)
def test_a_damaged_run_is_named(store, field, value):
    (file,) = (store.folder / "runs").rglob("*.json")
    text = file.read_text()
    damaged = text[:20]
    if field:
        damaged = json.dumps({**json.loads(text), field: value})
    file.write_text(damaged)
    with pytest.raises(ValueError, match=r"42\.json' is damaged"):
        load(store, RUN.config)
