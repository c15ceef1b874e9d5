"""Methods and seeds on the tiny demo."""

import json
import logging
import math
import shutil
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import pytest
import torch
from fusion_bench import RuntimeConstants
from fusion_bench.models.hf_clip import HFCLIPClassifier
from fusion_bench.taskpool import DummyTaskPool

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.compare.experiment import Experiment, WatchingEvaluator, part_of_test_data
from fusion_bench_nufilt.compare.presets import preset_specs
from fusion_bench_nufilt.compare.run import compare
from fusion_bench_nufilt.compare.specs import parse_methods
from fusion_bench_nufilt.compare.summary import save_comparison
from fusion_bench_nufilt.models import select_layers
from fusion_bench_nufilt.pages.comparison import print_comparison
from tests.clusters import cluster_of
from tests.compare.helpers import final, mean_of
from tests.test_command_line import TASKS as DEMO

pytestmark = pytest.mark.usefixtures("demo")
TASKS = DEMO[:3]
THREE = [f"~modelpool.models.{task}" for task in DEMO[3:]]
QUICK = ["method.max_steps=1", *THREE]
CHEAP = {"evaluate": "last"}


def run(
    out,
    methods="nufilt, nufilt/naive",
    seeds=(42,),
    overrides=QUICK,
    modelpool="nufilt_demo",
    **options,
):
    specs = parse_methods(methods, overrides)
    return compare(modelpool, specs, list(seeds), out, overrides=overrides, **options)


@pytest.fixture
def started(note_calls):
    """Whether there was a filter, and the seed, of every run that was started."""

    def filter_and_seed(algorithm, *args, **options):
        return algorithm.null_space, algorithm.seed

    return note_calls(NufiltContinualMergingAlgorithm, "run", filter_and_seed)


def test_every_method_runs_on_every_seed_with_heads_made_once(tmp_path, note_calls, started):
    encoded = note_calls(HFCLIPClassifier, "set_classification_task")
    result = run(tmp_path, seeds=(42, 43))
    assert started == [(True, 42), (False, 42), (True, 43), (False, 43)]  # whole seeds first
    assert len(encoded) == len(DEMO)
    assert result.tasks == TASKS
    for method in result.methods.values():
        assert [sorted(run.matrix.tasks) for run in method.runs.values()] == [sorted(TASKS)] * 2
        assert not any(math.isnan(value) for value in method.runs[42].matrix.mean_seen)
    assert all(sorted(scores) == sorted(TASKS) for scores in result.references.values())


def test_the_scores_are_those_of_the_method_by_itself(tmp_path):
    result = run(tmp_path, "nufilt", seeds=[43])
    experiment = Experiment(compose_run(["modelpool=nufilt_demo", *THREE]))
    alone = NufiltContinualMergingAlgorithm(max_steps=1, seed=43, save_on_every_step=False)
    alone.run(experiment.modelpool, experiment.evaluator)
    method = result.methods["nufilt"]
    assert mean_of(result, "nufilt", "ACC").mean == alone.matrix.metrics()["ACC"]
    assert mean_of(result, "nufilt", "BWT").mean == alone.matrix.metrics()["BWT"]
    assert method.runs[43].extra_parameters == 0
    assert method.runs[43].parameters == experiment.parameters


@pytest.mark.slow
def test_runs_side_by_side_have_the_scores_of_runs_one_by_one(tmp_path):
    seeds = (42, 43)
    methods = "nufilt, nufilt:null_rank=-1"  # the second fails
    alone = run(tmp_path / "alone", methods, seeds, keep_going=True, **CHEAP)
    together = run(tmp_path / "together", methods, seeds, jobs=2, keep_going=True, **CHEAP)
    assert matrices(together) == matrices(alone)
    assert failures(together) == failures(alone) != [{}, {}]


def failures(result):
    return [method.failures for method in result.methods.values()]


def matrices(result):
    rows = {}
    for label, method in result.methods.items():
        rows[label] = [run.matrix.rows() for run in method.finished.values()]
    return rows


def test_jobs_are_for_one_machine(tmp_path):
    with pytest.raises(ValueError, match="jobs=2 is for engine=local"):
        run(tmp_path, engine="ray", jobs=2)


@pytest.mark.slow
def test_a_cluster_finds_the_matrices_of_one_machine(tmp_path):
    methods = "nufilt:max_steps=1, opcm"
    seeds = (42, 43)
    expected = run(tmp_path / "local", methods, seeds, overrides=[], **CHEAP)
    with cluster_of({"num_cpus": 1}, {"num_cpus": 1}) as cluster:
        there = {"engine": "ray", "address": cluster.address, "overrides": []}
        found = run(tmp_path / "cluster", methods, seeds, **there, **CHEAP)
    assert matrices(found) == matrices(expected)
    assert not any(method.failures for method in found.methods.values())


def test_a_killed_process_is_said_and_what_is_finished_is_kept(tmp_path, monkeypatch):
    def die(pool, *call):
        raise BrokenProcessPool

    monkeypatch.setattr(ProcessPoolExecutor, "submit", die)
    with pytest.raises(ValueError, match=r"killed.*--jobs"):
        run(tmp_path, jobs=2, **CHEAP)
    assert (tmp_path / "references.json").exists()


def test_a_method_that_fails_is_reported_and_the_others_go_on(tmp_path, monkeypatch, caplog):
    """It is run again by the next comparison, see tests/oracle/test_experiments.py."""
    step = NufiltContinualMergingAlgorithm.merge_step

    def fails(self, number, *args):
        if self.null_space:
            raise RuntimeError("out of\n  memory")
        return step(self, number, *args)

    monkeypatch.setattr(NufiltContinualMergingAlgorithm, "merge_step", fails)
    with caplog.at_level(logging.INFO):
        broken, whole = run(tmp_path, **CHEAP).methods.values()
    assert broken.failures == {"RuntimeError: out of memory": [42]}
    assert (len(broken.finished), len(whole.finished)) == (0, 1)
    assert "nufilt, seed 42: RuntimeError: out of memory" in caplog.text
    # Where it failed:
    assert "in fails" in (tmp_path / "runs" / "nufilt" / "42.json").read_text()


@pytest.mark.slow
def test_a_methods_own_setting_wins_and_one_that_it_lacks_is_refused_or_fails_that_method_alone(
    tmp_path,
):
    run(tmp_path, "nufilt", **CHEAP)
    kept = sorted(tmp_path.rglob("*.json"))
    methods = "nufilt, more=nufilt:max_steps=2, weight_average"
    with pytest.raises(ValueError, match=r"weight_average: .*method\.max_steps"):
        run(tmp_path, methods, overwrite=True, **CHEAP)
    assert sorted(tmp_path.rglob("*.json")) == kept
    *nufilt, average = run(tmp_path, methods, keep_going=True, **CHEAP).methods.values()
    assert [method.config["max_steps"] for method in nufilt] == [1, 2]
    assert not any(method.failures for method in nufilt)
    assert ["method.max_steps" in reason for reason in average.failures] == [True]


def other_weights(monkeypatch, task):
    """Have the model pool load other weights under the name of a task."""
    load = Experiment.modelpool.func

    def modelpool(experiment):
        pool = load(experiment)
        load_model = pool.load_model

        def load_changed(name, *args, **kwargs):
            model = load_model(name, *args, **kwargs)
            if name == task:
                with torch.no_grad():
                    next(model.parameters()).add_(1)
            return model

        pool.load_model = load_changed
        return pool

    monkeypatch.setattr(Experiment, "modelpool", property(modelpool))


@pytest.mark.slow
def test_a_process_with_other_models_under_their_names_runs_nothing(tmp_path, monkeypatch):
    """As on a node of a cluster, where a folder may hold something else."""
    other_weights(monkeypatch, "digits")  # in this process alone
    says = r"under the same names.*: weights\.digits is not the same"
    with pytest.raises(ValueError, match=says):
        run(tmp_path, "nufilt", jobs=2, **CHEAP)
    assert not list(tmp_path.glob("runs/*/*"))


@pytest.mark.slow
def test_what_changes_no_result_is_gone_on_with(tmp_path, demo, started):
    run(tmp_path / "out", "nufilt", **CHEAP)
    shutil.copytree(demo / "digits", tmp_path / "renamed")
    words = [
        "fabric.accelerator=cpu",
        f"modelpool.models.digits={tmp_path / 'renamed'}",
        "modelpool.taskpool.dataloader_kwargs.num_workers=0",
    ]
    run(tmp_path / "out", "nufilt", overrides=[*QUICK, *words], **CHEAP)
    assert len(started) == 1


@pytest.mark.slow
def test_fast_dev_run_scores_one_batch_and_says_so(tmp_path, capsys):
    batch = "modelpool.taskpool.dataloader_kwargs.batch_size=4"
    overrides = [*THREE, batch, "fast_dev_run=true"]
    result = run(tmp_path, "weight_average", overrides=overrides, **CHEAP)
    scores = {**result.references["pretrained"], **result.references["individual"]}
    scores |= {task: final(result, "weight_average", task).mean for task in TASKS}
    assert all((4 * score).is_integer() for score in scores.values())
    save_comparison(result, tmp_path)
    for file in ("table.md", "table.tex", "per_task.md", "index.html"):
        text = (tmp_path / file).read_text().replace("&#39;", "'").replace(r"\_", "_")
        assert "scored on one batch of each task's test data (fast_dev_run=true)" in text, file
    settings = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert settings["resolved"]["scored"].startswith("one batch of each task's test data")
    print_comparison(result)
    assert "scored on one batch" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ValueError, match=r'resolved\.scored is "one batch .* there and "all'):
        run(tmp_path, "weight_average", overrides=[*THREE, batch], **CHEAP)
    assert RuntimeConstants.debug is False


def test_the_task_pool_that_is_named_wins(tmp_path):
    overrides = [*QUICK, "taskpool=nufilt_demo", "~taskpool.test_datasets.digits"]
    result = run(tmp_path, "nufilt", overrides=overrides, **CHEAP)
    assert result.matrices(42)["nufilt"].missing == ["digits"]
    assert result.references["individual"]["digits"] is None


@pytest.mark.parametrize(
    ("modelpool", "overrides", "message"),
    [
        ("no_such_pool", [], "no_such_pool"),
        ("nufilt_demo", ["~modelpool.taskpool"], "brings no task pool"),
        ("nufilt_demo", ["method=opcm/opcm"], "chosen by options of their own"),
        ("nufilt_demo", ["bogus.key=1"], "bogus"),
    ],
)
def test_what_can_not_work_for_any_method_is_refused_before_any_work(
    tmp_path, modelpool, overrides, message
):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", "nufilt", modelpool=modelpool, overrides=overrides)
    assert not (tmp_path / "out").exists()


def test_nothing_is_printed_meanwhile(tmp_path, capfd):
    run(tmp_path, "nufilt:max_steps=1, weight_average", overrides=THREE, **CHEAP)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_fifth_of_the_test_data_is_scored_or_the_rest_and_the_results_say_so(
    tmp_path, note_calls
):
    def indices(classifier, images, **options):
        return set(images.dataset.indices)

    parts = []
    for validation in (True, False):
        experiment = Experiment(compose_run(["modelpool=nufilt_demo"]), validation)
        scored = note_calls(experiment.evaluator.taskpool, "_evaluate", indices)
        experiment.evaluator.report(experiment.modelpool.load_model("digits"), ["digits"])
        parts += scored
    held_out, rest = parts
    assert held_out.isdisjoint(rest)
    assert held_out | rest == set(range(len(held_out) + len(rest)))
    assert len(held_out) == (len(held_out) + len(rest)) // 5
    found = run(tmp_path, "weight_average", overrides=THREE, validation=True, **CHEAP)
    save_comparison(found, tmp_path)
    assert "scored on a fifth of the test data" in (tmp_path / "table.md").read_text()
    with pytest.raises(
        ValueError,
        match=r'results of other settings: resolved\.scored is "a fifth',
    ):
        run(tmp_path, "weight_average", overrides=THREE, **CHEAP)
    with pytest.raises(
        ValueError, match="a part of the test data needs a CLIP or Flan-T5 pool, got DummyTaskPool"
    ):
        WatchingEvaluator(DummyTaskPool(), torch.device("cpu"), partial(part_of_test_data, True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "file"),
    [
        ("paper", "table.md"),
        ("sensitivity", "sensitivity.png"),
        ("overhead", "table.md"),
    ],
)
def test_a_preset_runs_whole(tmp_path, preset, file):
    """The ablation does in tests/test_docs.py."""
    specs = preset_specs(preset, "nufilt_demo", THREE, with_data=preset == "overhead")
    options = {"overrides": THREE, "preset": preset, **CHEAP}
    result = compare("nufilt_demo", specs, [42], tmp_path, **options)
    assert preset != "overhead" or len(result.done) == 8
    assert not any(method.failures for method in result.methods.values())
    assert file in save_comparison(result, tmp_path)


@pytest.mark.slow
def test_a_comparison_says_what_each_method_changed_of_the_pretrained_model(tmp_path):
    """NUFILT the merged layers alone, task arithmetic every tensor."""
    result = run(tmp_path, "nufilt, task_arithmetic", overrides=THREE, **CHEAP)
    nufilt, arithmetic = [method.runs[42] for method in result.methods.values()]
    base, _ = Experiment(compose_run(["modelpool=nufilt_demo"])).load("_pretrained_")
    layers = select_layers(base)
    assert nufilt.changed_tensors == len(layers)
    merged_elements = sum(view.read(base).numel() for view in layers.values())
    elements = sum(parameter.numel() for parameter in base.parameters())
    assert nufilt.changed_share == pytest.approx(merged_elements / elements)
    assert arithmetic.changed_tensors == len(list(base.parameters()))
    assert arithmetic.changed_share == 1
