"""An option that has another name than before is taken by its former name wherever options are
given, and read wherever they were saved, with a line that says the new name.
"""

import dataclasses
import json
import logging
from importlib import reload

import pytest
import yaml

import fusion_bench_nufilt.cli.merge
from fusion_bench_nufilt import LayerwiseMergingAlgorithm, NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.compare.specs import parse_methods
from fusion_bench_nufilt.merge import merge_folders, output
from fusion_bench_nufilt.methods import METHODS
from fusion_bench_nufilt.methods.options import DeviceConfig, ProtocolConfig, Settings, TargetConfig
from fusion_bench_nufilt.nufilt import FusionConfig
from fusion_bench_nufilt.utils import options
from fusion_bench_nufilt.utils.misplaced import refuse_misplaced
from tests.cli.helpers import nufilt
from tests.continual.helpers import (
    InterruptedRunError,
    interrupt_after,
    logging_to,
    noting,
    pool,
)
from tests.merge.helpers import RANKS, interrupt, manifest, merge, plan, same, save_stream, tensors
from tests.tiny_models import llama

LINE = "null_dim is called null_rank now"
OTHER_RANKS = [f"{name}={value}" for name, value in RANKS.items() if name != "null_rank"]


@pytest.fixture(autouse=True)
def renamed(monkeypatch):
    """The package as if `null_rank` was called `null_dim` before."""
    (option,) = [field for field in dataclasses.fields(FusionConfig) if field.name == "null_rank"]
    monkeypatch.setattr(option, "metadata", {**option.metadata, "formerly": "null_dim"})
    monkeypatch.setattr(options, "_renamed_options", [option])
    options._warn_once.cache_clear()
    reload(fusion_bench_nufilt.cli.merge)
    yield
    monkeypatch.undo()
    reload(fusion_bench_nufilt.cli.merge)


@pytest.fixture
def stream(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    return tmp_path


def models(folder, *tasks):
    words = ["--base", folder / "base"]
    for task in tasks:
        words += ["--task", folder / task]
    return [*words, *OTHER_RANKS]


def with_former_name(file):
    """Have a file say what it would have said before."""
    text = file.read_text()
    assert '"null_rank"' in text
    file.write_text(text.replace('"null_rank"', '"null_dim"'))


@pytest.mark.parametrize("word", [("--null-dim", "6"), ("null_dim=6",)])
def test_on_the_command_line(stream, word, caplog):
    expected = tensors(merge(stream, ["task1"], "expected"))
    code, text = nufilt("merge", *models(stream, "task1"), *word, "--out", stream / "out")
    assert code == 0, text
    assert LINE in caplog.text
    assert manifest(stream / "out")["settings"]["null_rank"] == 6
    assert same(tensors(stream / "out"), expected)


def test_help_has_the_name_of_today_alone():
    _, text = nufilt("merge", "--help")
    assert "--null-rank" in text
    assert "--null-dim" not in text


@pytest.mark.parametrize("place", ["settings", "beside the models"])
def test_in_a_recipe(stream, place, caplog):
    expected = tensors(merge(stream, ["task1"], "expected"))
    settings = {**RANKS, "null_dim": 6}
    del settings["null_rank"]
    recipe = {"base": str(stream / "base"), "tasks": [str(stream / "task1")]}
    recipe |= {"settings": settings} if place == "settings" else settings
    (stream / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code, text = nufilt("merge", stream / "recipe.yaml", "--out", stream / "out")
    assert code == 0, text
    assert LINE in caplog.text
    assert same(tensors(stream / "out"), expected)


def test_what_is_typed_wins_over_the_former_name_in_a_recipe(stream):
    recipe = {"base": str(stream / "base"), "tasks": [str(stream / "task1")], "null_dim": 3}
    (stream / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    words = ("null_rank=6", *OTHER_RANKS, "--out", stream / "out")
    code, text = nufilt("merge", stream / "recipe.yaml", *words)
    assert code == 0, text
    assert manifest(stream / "out")["settings"]["null_rank"] == 6


def test_both_names_with_two_values_are_refused(stream):
    words = (*models(stream, "task1"), "null_dim=6", "null_rank=5", "--out", stream / "out")
    code, text = nufilt("merge", *words)
    assert code == 1
    assert f"{LINE}, and both are given: leave null_dim out" in text


def test_in_the_manifest_of_what_is_gone_on_from_and_of_a_recipe(stream, caplog):
    merge(stream, ["task1"], "one")
    expected = tensors(merge(stream, ["task2"], "two", merged="one"))
    with_former_name(stream / "one" / "nufilt.json")
    words = ("--merged", stream / "one", "--task", stream / "task2", "--out", stream / "new")
    code, text = nufilt("merge", *words, "--no-verify")
    assert code == 0, text
    assert LINE in caplog.text
    assert "warning" not in text
    assert same(tensors(stream / "new"), expected)
    with_former_name(stream / "new" / "nufilt.json")
    words = (stream / "new" / "nufilt.json", "--out", stream / "again", "--no-verify")
    code, text = nufilt("merge", *words)
    assert code == 0, text
    assert same(tensors(stream / "again"), expected)


def test_in_a_finished_result(stream):
    out = merge(stream, ["task1"])
    with_former_name(out / "nufilt.json")
    assert merge_folders(plan(stream, ["task1"]), out) == out


def test_in_the_journal_of_a_merge(stream, caplog):
    caplog.set_level(logging.INFO)
    expected = tensors(merge(stream, ["task1"], "expected"))
    done = interrupt(stream, tasks=["task1"])
    journal = output.work_folder(stream / "out") / "journal.jsonl"
    head, *records = journal.read_text().splitlines()
    text = head.partition(" ")[2].replace('"null_rank"', '"null_dim"')
    journal.write_text("\n".join([output._line(text), *records]) + "\n")
    assert same(tensors(merge(stream, ["task1"])), expected)
    assert f"going on: {done} of" in caplog.text
    assert LINE in caplog.text


def algorithm_in(folder, **settings):
    settings = {**RANKS, "shuffle_order": False, **settings}
    return logging_to(folder, NufiltContinualMergingAlgorithm(**settings))


def test_in_a_run_folder(tmp_path, caplog):
    with pytest.raises(InterruptedRunError):
        algorithm_in(tmp_path).run(pool(2), on_step=interrupt_after(1))
    with_former_name(tmp_path / "run.json")
    with_former_name(tmp_path / "checkpoints" / "merged_model_0" / "nufilt.json")
    steps = []
    algorithm_in(tmp_path, resume=True).run(pool(2), on_step=noting(steps))
    assert steps == [2]
    assert LINE in caplog.text


@pytest.mark.parametrize("name", ["nufilt", None])
def test_of_an_algorithm_as_a_configuration_or_the_store_of_a_comparison_has_it(name, caplog):
    """Both make it of keys and values; a configuration has the default by its name, too."""
    default = FusionConfig().null_rank
    for given in ({"null_dim": 5}, {"null_dim": 5, "null_rank": default}):
        if name is None:
            algorithm = NufiltContinualMergingAlgorithm(**given)
        else:
            algorithm = LayerwiseMergingAlgorithm(name, **given)
        settings = algorithm.settings_in_effect()
        assert settings["null_rank"] == algorithm.null_rank == 5
        assert "null_dim" not in settings
        assert LINE in caplog.text


def test_of_a_baseline(monkeypatch):
    (option,) = [field for field in dataclasses.fields(ProtocolConfig) if field.name == "evaluate"]
    monkeypatch.setattr(option, "metadata", {**option.metadata, "formerly": "scored"})
    monkeypatch.setattr(options, "_renamed_options", [option])
    assert NufiltContinualMergingAlgorithm(scored="last").evaluate == "last"
    with pytest.raises(ValueError, match="evaluate must be one of"):
        NufiltContinualMergingAlgorithm(scored="never")


def test_among_the_words_of_a_comparison():
    assert compose_run(["method=nufilt", "method.null_dim=5"]).method.null_rank == 5
    (spec,) = parse_methods("nufilt:null_dim=5")
    assert spec.overrides[-1] == "method.null_rank=5"
    # A pool may have a key of any name.
    words = ["method=nufilt", "+modelpool.null_dim=5"]
    assert compose_run(words).modelpool.null_dim == 5


def test_hydra_s_own_command_line_is_refused_with_the_name_of_today():
    """Hydra takes the keys of the configuration alone."""
    message = r"'method\.null_dim=5': null_dim is called null_rank now: say method\.null_rank=5$"
    with pytest.raises(ValueError, match=message):
        refuse_misplaced(["method=nufilt", "method.null_dim=5"], "fusion_bench")
    with pytest.raises(ValueError, match=r"say method\.null_rank=5$"):
        refuse_misplaced(["method=nufilt", "+null_dim=5"], "fusion_bench")


def test_in_a_file_of_mergekit(stream, monkeypatch):
    registry = pytest.importorskip("mergekit.merge_methods.registry")
    from mergekit.io.tasks import LoaderCache

    from fusion_bench_nufilt.merge.in_mergekit import MergekitMethod, register_methods

    LoaderCache.loaders.clear()  # those of other tests, by the names in their files
    register_methods()
    monkeypatch.setitem(registry._METHODS, "nufilt", MergekitMethod(METHODS["nufilt"]))
    monkeypatch.chdir(stream)
    expected = tensors(merge(stream, ["task1"], "expected"))
    parameters = {**RANKS, "null_dim": 6}
    del parameters["null_rank"]
    content = {"merge_method": "nufilt", "base_model": "base", "models": [{"model": "task1"}]}
    (stream / "mergekit.yaml").write_text(yaml.safe_dump({**content, "parameters": parameters}))
    words = ("--no-copy-tokenizer", "--no-write-model-card", "--quiet")
    code, text = nufilt("mergekit", "mergekit.yaml", "theirs", *words)
    assert code == 0, text
    assert same(tensors(stream / "theirs"), expected)


def test_no_option_has_a_name_that_another_had(monkeypatch):
    monkeypatch.undo()
    kinds = [TargetConfig, Settings, ProtocolConfig, DeviceConfig]
    kinds += [method.Options for method in METHODS.values()]
    names = set()
    for kind in kinds:
        names |= {option.name for option in dataclasses.fields(kind)}
    assert names.isdisjoint(options.current_names())
    assert json.dumps(options.current_names())
