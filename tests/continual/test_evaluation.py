"""Which scores are taken, and that nothing is set up twice."""

import json
import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fusion_bench import BaseModelPool
from fusion_bench.compat.taskpool import TaskPool as V01TaskPool
from fusion_bench.taskpool import BaseTaskPool
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_nufilt.continual import ContinualMergingAlgorithm, Evaluator
from fusion_bench_nufilt.continual.evaluation import TasksByName, score
from fusion_bench_nufilt.pages import run as run_page
from fusion_bench_nufilt.pages.tables import print_matrix
from fusion_bench_nufilt.utils.manifest import load_checkpoint
from tests.continual.helpers import logging_to
from tests.pages.test_metrics import matrix

TASKS = ["a", "b", "c", "d"]


class Counter(nn.Linear):
    """A model whose one weight says how many tasks were merged."""

    def __init__(self):
        super().__init__(1, 1, bias=False)
        nn.init.zeros_(self.weight)


class Counting(ContinualMergingAlgorithm):
    """A method that counts."""

    def merge_step(self, step, name, pretrained, merged, task):
        merged.weight.data += 1
        return merged


class WholePool(BaseTaskPool):
    """Scores 1 / (tasks merged so far) on its tasks, and remembers being asked."""

    def __init__(self, tasks):
        super().__init__()
        self.tasks = tasks
        self.calls = []

    def evaluate(self, model):
        self.calls.append(int(model.weight))
        return {task: {"accuracy": 1 / model.weight.item(), "loss": 1.0} for task in self.tasks}


class V01Pool(V01TaskPool):
    """A v0.1 pool that counts how often a task is loaded and which are evaluated."""

    def __init__(self, tasks):
        super().__init__(OmegaConf.create({"tasks": [{"name": task} for task in tasks]}))
        self.loaded = []
        self.evaluated = []

    def load_task(self, name):
        self.loaded.append(name)
        return SimpleNamespace(evaluate=lambda model: self.score(model, name))

    def score(self, model, name):
        self.evaluated.append((int(model.weight), name))
        return {"accuracy": 1 / model.weight.item()}


def run(taskpool, evaluate, names=TASKS, **options):
    algorithm = Counting(shuffle_order=False, evaluate=evaluate, **options)
    algorithm.run({"_pretrained_": Counter()} | {name: Counter() for name in names}, taskpool)
    return algorithm.matrix


LAST = [(4, task) for task in TASKS]
DIAGONAL = [(1, "a"), (2, "b"), (3, "c"), *LAST]
EVERY_STEP_ALL = list(product((1, 2, 3, 4), TASKS))
EVERY_STEP = [(step, task) for step, task in EVERY_STEP_ALL if task in TASKS[:step]]
BWT = ((0.25 - 1) + (0.25 - 0.5) + (0.25 - 1 / 3)) / 3


@pytest.mark.parametrize(
    ("evaluate", "evaluated", "bwt", "zero_shot"),
    [
        ("last", LAST, math.nan, math.nan),
        ("diagonal", DIAGONAL, BWT, math.nan),
        ("every_step", EVERY_STEP, BWT, math.nan),
        ("every_step_all", EVERY_STEP_ALL, BWT, (1 + 1 / 2 + 1 / 3) / 3),
    ],
)
def test_what_is_scored_after_which_step_and_every_task_is_loaded_once(
    evaluate, evaluated, bwt, zero_shot
):
    pool = V01Pool(TASKS)
    result = run(pool, evaluate)
    assert pool.evaluated == evaluated
    assert sorted(pool.loaded) == TASKS
    metrics = result.metrics()
    found = [metrics[name] for name in ("ACC", "BWT", "zero_shot")]
    assert found == pytest.approx([0.25, bwt, zero_shot], nan_ok=True)


def test_a_pool_that_can_not_be_narrowed_is_asked_as_a_whole():
    pool = WholePool(TASKS)
    result = run(pool, "diagonal")
    assert pool.calls == [1, 2, 3, 4]
    assert result.metrics()["BWT"] == pytest.approx(BWT)


def test_a_task_that_the_pool_lacks_is_missing_and_the_merge_goes_on(caplog):
    result = run(V01Pool(["a", "b", "d"]), "diagonal")
    assert result.missing == ["c"]
    assert result.metrics()["ACC"] == pytest.approx(0.25)
    assert caplog.text.count("no task 'c'") == 1


def test_models_named_after_glue_find_their_tasks():
    result = run(V01Pool(["cola", "stsb"]), "last", names=["glue-cola", "glue-stsb"])
    assert result.metrics()["ACC"] == pytest.approx(0.5)


def test_tasks_of_the_pool_beyond_the_stream_are_in_the_final_report_only():
    pool = V01Pool([*TASKS, "unseen"])
    run(pool, "diagonal")
    assert [call for call in pool.evaluated if call[1] == "unseen"] == [(4, "unseen")]


class Harness(TasksByName):
    """It has a task of one model, and remembers how many items it was asked for."""

    task_names = ("a",)
    batch_size = 3

    def evaluate(self, model, tasks=None, limit=None):
        self.limit = limit
        return {}

    def load_test_data(self):
        return {}


@pytest.mark.parametrize(("fast", "limit"), [(True, 3), (False, None)])
def test_a_harness_that_is_told_so_scores_one_batch(fast, limit):
    harness = Harness()
    harness.fast_dev_run = fast
    Evaluator(harness).report(Counter(), [])
    assert harness.limit == limit


def test_a_score_is_accuracy_or_spearmans_rho():
    assert score({"accuracy": 0.5, "loss": 1.0}) == 0.5
    assert score({"spearman_rho": 0.25}) == 0.25
    assert math.isnan(score({"loss": 1.0}))


def test_a_rank_correlation_that_does_not_exist_is_missing_and_the_report_is_json():
    pool = V01Pool(["stsb"])
    pool.load_task = lambda name: SimpleNamespace(evaluate=lambda model: {"spearman_rho": math.nan})
    report = Evaluator(pool).report(Counter(), ["stsb"])
    assert json.loads(json.dumps(report, allow_nan=False))["stsb"] == {"spearman_rho": None}
    assert math.isnan(score(report["stsb"]))


def test_without_a_task_pool_nothing_is_scored():
    assert torch.isnan(torch.tensor(run(None, "every_step").values)).all()


# --- what is left behind ---


def test_the_matrix_is_printed_whole_with_acc_and_bwt(capsys):
    print_matrix(matrix([[0.912], [0.8, 0.7], [0.6, 0.65, 0.5]]), title="method")
    text = capsys.readouterr().out
    assert all(word in text for word in ("method", "91.2", "65.0", "ACC 58.3", "BWT -18.1"))


def test_the_file_holds_fractions_and_no_value_where_nothing_was_measured(tmp_path):
    matrix([[0.9], [math.nan, 0.7], [0.6, 0.65]]).save(tmp_path, {"method": "m", "seed": 1})
    content = json.loads(
        (tmp_path / "accuracy_matrix.json").read_text(),
        parse_constant=lambda word: pytest.fail(word),
    )
    assert content["accuracy_matrix"] == [[0.9, None, None], [None, 0.7, None], [0.6, 0.65, None]]
    assert (content["seed"], content["tasks"], content["missing"]) == (1, ["a", "b", "c"], ["c"])
    assert content["ACC"] == pytest.approx(0.625)


def test_a_pool_that_returns_no_scores_is_named():
    pool = WholePool(TASKS)
    pool.evaluate = lambda model: None
    with pytest.raises(
        ValueError, match="the task pool WholePool returned None in place of scores by task"
    ):
        Evaluator(pool).report(Counter(), TASKS)


# --- models that are merged onto an earlier merge ---


def load_counter(pretrained_model_name_or_path):
    model = Counter()
    load_checkpoint(model, Path(pretrained_model_name_or_path))
    return model


def go_on(tmp_path, pool, evaluate, pool_before=None):
    """Merge c and d onto a saved merge of a and b."""
    first = logging_to(tmp_path / "first", Counting(shuffle_order=False))
    first.run({name: Counter() for name in ("_pretrained_", "a", "b")}, pool_before)
    merged = tmp_path / "first" / "checkpoints" / "merged_model_1"
    new = {"_target_": "tests.continual.test_evaluation.Counter"}
    models = dict.fromkeys(("_pretrained_", "c", "d"), new)
    load = {"_target_": "tests.continual.test_evaluation.load_counter"}
    models["_merged_"] = {**load, "pretrained_model_name_or_path": str(merged)}
    algorithm = Counting(shuffle_order=False, evaluate=evaluate)
    logging_to(tmp_path / "second", algorithm).run(BaseModelPool(OmegaConf.create(models)), pool)
    return algorithm


@pytest.mark.parametrize(
    ("evaluate", "evaluated"),
    [
        ("last", LAST),
        ("diagonal", [(2, "a"), (2, "b"), (3, "c"), *LAST]),
    ],
)
def test_the_tasks_of_the_earlier_merge_are_scored_before_and_after(tmp_path, evaluate, evaluated):
    pool = V01Pool(TASKS)
    algorithm = go_on(tmp_path, pool, evaluate)
    assert pool.evaluated == evaluated
    assert algorithm.matrix.tasks == TASKS
    assert algorithm.matrix.missing == []
    before = math.nan
    if evaluate == "diagonal":
        before = 0.5
    assert algorithm.scores.means_of_earlier() == pytest.approx((before, 0.25), nan_ok=True)
    saved = json.loads((tmp_path / "second" / "accuracy_matrix.json").read_text())
    assert saved["tasks"] == TASKS


@pytest.mark.parametrize("before", ["the same", "none", "of one batch"])
def test_bwt_is_over_both_runs_or_says_of_how_many_tasks_it_is(tmp_path, before, capfd, pages):
    pool_before = {"the same": V01Pool(["a", "b"]), "none": None}.get(before)
    if before == "of one batch":
        pool_before = V01Pool(["a", "b"])
        pool_before.fast_dev_run = True
    algorithm = go_on(tmp_path, V01Pool(TASKS), "diagonal", pool_before)
    whole = run(V01Pool(TASKS), "diagonal").metrics()["BWT"]
    if before == "the same":
        assert algorithm.matrix.metrics()["BWT"] == pytest.approx(whole)
        assert "of 3 tasks" not in capfd.readouterr().out
    else:
        bwt = algorithm.matrix.metrics()["BWT"]
        assert bwt == pytest.approx(((0.25 - 0.5) + (0.25 - 1 / 3)) / 2)
        summary = algorithm.matrix.summary()
        assert summary == "ACC 25.0   BWT -16.7 (2 of 3 tasks)"
        assert summary in " ".join(capfd.readouterr().out.split()).replace("BWT", "  BWT")
        assert "BWT -16.7 (2 of 3 tasks)" in " ".join(
            (tmp_path / "second" / "index.html").read_text().split()
        )


def test_the_seconds_of_a_step_stand_beside_it_also_after_an_earlier_merge(tmp_path):
    algorithm = go_on(tmp_path, V01Pool(TASKS), "diagonal")
    seconds = run_page._steps(algorithm.matrix, algorithm.merge_seconds)["merging s"]
    assert seconds.isna().tolist() == [True, True, False, False]
    assert seconds.tolist()[2:] == algorithm.merge_seconds


def test_an_earlier_task_that_the_task_pool_lacks_is_not_missed(tmp_path, caplog):
    algorithm = go_on(tmp_path, V01Pool(["b", "c", "d"]), "diagonal")
    assert algorithm.matrix.tasks == ["b", "c", "d"]
    assert algorithm.matrix.missing == []
    assert "the task pool has no task" not in caplog.text


def reports(folder, evaluate, taskpool, names=TASKS):
    algorithm = Counting(shuffle_order=False, evaluate=evaluate)
    models = {"_pretrained_": Counter()} | {name: Counter() for name in names}
    logging_to(folder, algorithm).run(models, taskpool)
    files = sorted(folder.glob("report_*.json"))
    assert len(files) == len(names)
    return [json.loads(file.read_text()) for file in files], algorithm.scores.final_report()


class ByTask(V01Pool):
    """Each task has a score of its own."""

    def score(self, model, name):
        return {"accuracy": "abcdefg".index(name) / 10, "loss": 1.0}


@pytest.mark.parametrize("evaluate", ["diagonal", "every_step", "every_step_all"])
def test_the_average_of_a_steps_report_is_that_of_all_tasks_merged_so_far_or_left_out(
    tmp_path, evaluate
):
    steps, final = reports(tmp_path, evaluate, ByTask([*TASKS, "g"]))
    for number, report in enumerate(steps):
        mean = sum(range(number + 1)) / (number + 1) / 10
        whole = {"accuracy": pytest.approx(mean), "loss": 1.0}
        if evaluate == "diagonal" and 0 < number < 3:
            assert "average" not in report
        else:
            assert report["average"] == whole
    # FusionBench's final report is that of the whole pool.
    assert steps[-1]["g"]["accuracy"] == 0.6
    assert final["average"]["accuracy"] == pytest.approx((0 + 1 + 2 + 3 + 6) / 50)


def test_there_is_no_average_over_fewer_tasks_than_were_merged(tmp_path):
    steps, _ = reports(tmp_path, "every_step", ByTask(["a", "c", "d"]))
    assert ["average" in report for report in steps] == [True, False, False, False]
