"""An interrupted run goes on with the same result; one more model on top of a merge is the same
thing.
"""

import hashlib
import json
import shutil
from functools import cache

import pandas as pd
import pytest
import torch
import transformers as hf
from fusion_bench.modelpool import CLIPVisionModelPool
from safetensors.torch import load_file, save_file

from fusion_bench_nufilt import (
    LayerwiseMergingAlgorithm,
    LoRAWEMoE,
    NufiltContinualMergingAlgorithm,
)
from fusion_bench_nufilt.continual.evaluation import TasksByName
from fusion_bench_nufilt.continual.run_folder import finished_step
from fusion_bench_nufilt.utils.files import MANIFEST
from fusion_bench_nufilt.utils.tensors import raw_bytes
from tests.classifiers import KINDS
from tests.continual.baselines.helpers import GLUE, baseline
from tests.continual.helpers import (
    InterruptedRunError,
    contents,
    interrupt_after,
    logging_to,
    noting,
    pool,
    saved_pool,
)
from tests.continual.test_evaluation import Counter, Counting, WholePool
from tests.tiny_models import build, clip, t5

SMALL = {
    "null_rank": 6,
    "lora_rank": 4,
    "task_rank": 3,
    "max_steps": 5,
    "shuffle_order": False,
    "other_params": "mean",
}


def algorithm_in(folder, **settings):
    return logging_to(folder, NufiltContinualMergingAlgorithm(**{**SMALL, **settings}))


def outcome(folder, first=1):
    """All that a run leaves behind from a step on and that must not depend on when it ran."""
    steps = {}
    for path in (folder / "checkpoints").glob("merged_model_*"):
        manifest = finished_step(path).whole()
        if manifest["step"] >= first:
            steps[manifest["step"]] = (manifest["files"], manifest["tasks"])
    reports = {}
    for path in folder.glob("report_*.json"):
        if int(path.stem.removeprefix("report_")) >= first - 1:
            reports[path.name] = json.loads(path.read_text())
    rows = None
    if (folder / "layers.csv").exists():
        layers = pd.read_csv(folder / "layers.csv", dtype=str)
        seconds = layers["seconds"].astype(float)
        if "solving_seconds" in layers:
            assert (seconds >= layers.pop("solving_seconds").astype(float)).all()
        rows = layers[layers["step"].astype(int) >= first].drop(columns="seconds").values.tolist()
    return steps, reports, rows


class Weights(TasksByName):
    """Scores that any bit of a model changes; it is interrupted where it is asked for the nth
    time.
    """

    task_names = ("task1", "task2", "task3", "task4")
    interrupted_at = 0

    def load_test_data(self):
        return {}

    def evaluate(self, model, tasks=None, limit=None):
        self.interrupted_at -= 1
        if self.interrupted_at == 0:
            raise InterruptedRunError
        sha = hashlib.sha256()
        for tensor in model.state_dict().values():
            sha.update(bytes(raw_bytes(tensor)))
        scores = {}
        for number, name in enumerate(self.task_names):
            if name in tasks:
                scores[name] = {"accuracy": sha.digest()[number] / 256}
        return scores


class WeightsOfTexts(GLUE):
    """The same of texts, on which a method trains."""

    def __init__(self):
        super().__init__(["task1", "task2"])
        self.scores = Weights()

    def load_task(self, name):
        task = super().load_task(name)
        task.evaluate = lambda model: self.scores.evaluate(model, [name])[name]
        return task


def method_in(folder, kind):
    """A method of each kind, with a log directory."""
    options = {"shuffle_order": False, "evaluate": "every_step"}
    if kind == "without state":
        return logging_to(folder, LayerwiseMergingAlgorithm("sum", **options))
    if kind in ("with state", "with heads"):
        return algorithm_in(folder, evaluate="every_step")
    if kind == "trained":
        return logging_to(folder, LoRAWEMoE(rule="released", lr=0.01, max_steps=2, **options))
    rule = {"batch rule": "task_arithmetic", "running rule": "magmax"}[kind]
    words = [f"method.{key}={value}" for key, value in options.items()]
    if rule == "magmax":
        words.append("method.rule=add_running")
    return logging_to(folder, baseline(rule, *words))


def stream_of(kind, dtype):
    """The models of a stream, and what makes a task pool for them."""
    if kind == "trained":
        return pool(2, t5()), WeightsOfTexts
    if kind != "with heads":
        return {name: model.to(dtype) for name, model in pool().items()}, Weights
    models = pool(base=build(hf.BertForSequenceClassification, KINDS["bert"][1], 0))
    for name, model in models.items():
        model.config.id2label = {0: f"no {name}", 1: name}
    return models, Weights


@pytest.fixture(scope="module")
def clean_runs(tmp_path_factory):
    """The folders of clean runs and their scores, by kind of method and dtype."""

    @cache
    def run(kind, dtype):
        folder = tmp_path_factory.mktemp("clean")
        models, taskpool = stream_of(kind, dtype)
        algorithm = method_in(folder, kind)
        algorithm.run(models, taskpool())
        return folder, algorithm.matrix.rows()

    return run


#: Kinds of methods, and where they stop: after a step, or while that step is scored.
PAIRS = [
    ("with state", "step 1", torch.bfloat16),
    ("with state", "scoring 2", torch.bfloat16),
    ("with state", "step 3", torch.bfloat16),
    ("with state", "_merged_", torch.bfloat16),
    ("with state", "step 4", torch.float32),
    ("without state", "scoring 1", torch.float32),
    ("without state", "step 3", torch.float32),
    ("without state", "_merged_", torch.float32),
    ("batch rule", "step 2", torch.bfloat16),
    ("batch rule", "scoring 4", torch.bfloat16),
    ("batch rule", "_merged_", torch.bfloat16),
    ("running rule", "step 1", torch.bfloat16),
    ("running rule", "scoring 3", torch.bfloat16),
    ("running rule", "_merged_", torch.bfloat16),
    ("trained", "step 1", torch.float32),
    ("trained", "scoring 2", torch.float32),
    ("with heads", "step 2", torch.float32),
]


@pytest.mark.parametrize(("kind", "stop", "dtype"), PAIRS)
def test_a_run_that_goes_on_has_the_bits_and_the_numbers_of_a_clean_one(
    tmp_path, clean_runs, kind, stop, dtype
):
    clean, scores = clean_runs(kind, dtype)
    models, taskpool = stream_of(kind, dtype)
    last = len(models) - 1
    interrupted = taskpool()
    if stop == "_merged_":
        step = 2
        of_run = {name: models[name] for name in ("_pretrained_", "task3", "task4")}
        merged_before = clean / "checkpoints" / "merged_model_1"
        models = saved_pool(tmp_path / "models", of_run, _merged_=merged_before)
        first = 3
    else:
        first = 1
        place, number = stop.split()
        step = int(number)
        on_step = interrupt_after(step)
        if place == "scoring":
            on_step = None
            # Of the steps before, each task by itself where a pool is asked so.
            getattr(interrupted, "scores", interrupted).interrupted_at = step
        with pytest.raises(InterruptedRunError):
            method_in(tmp_path / "run", kind).run(models, interrupted, on_step)
        if stop == "step 3":
            models = saved_pool(tmp_path / "models", models)  # the same from another place
    steps = []
    resumed = method_in(tmp_path / "run", kind)
    resumed.run(models, taskpool(), noting(steps))
    assert steps == list(range(step + 1, last + 1))
    assert outcome(tmp_path / "run", first) == outcome(clean, first)
    assert resumed.matrix.rows() == scores
    assert len(resumed.merge_seconds) == last - first + 1


@pytest.mark.parametrize("file", ["model.safetensors", MANIFEST])
def test_a_damaged_step_is_made_again(tmp_path, file, caplog):
    algorithm_in(tmp_path).run(pool())
    expected = outcome(tmp_path)
    damaged = tmp_path / "checkpoints" / "merged_model_3" / file
    damaged.write_bytes(damaged.read_bytes()[:-10])
    steps = []
    algorithm_in(tmp_path).run(pool(), on_step=noting(steps))
    assert steps == [4]
    assert "merged_model_3" in caplog.text
    assert outcome(tmp_path) == expected


def test_a_model_in_memory_is_merged_onto_where_its_number_of_models_is_told(tmp_path):
    models = pool()
    whole = algorithm_in(tmp_path / "whole").run(models).state_dict()
    algorithm_in(tmp_path / "first").run(
        {key: models[key] for key in ("_pretrained_", "task1", "task2")}
    )
    checkpoint = tmp_path / "first" / "checkpoints" / "merged_model_1"
    rest = {key: models[key] for key in ("_pretrained_", "task3", "task4")}
    rest["_merged_"] = type(clip()).from_pretrained(checkpoint)
    steps = []
    algorithm = algorithm_in(tmp_path / "rest", num_merged=2)
    merged = algorithm.run(rest, on_step=noting(steps)).state_dict()
    assert steps == [3, 4]
    assert all(torch.equal(value, whole[key]) for key, value in merged.items())
    manifest = finished_step(tmp_path / "rest" / "checkpoints" / "merged_model_3").whole()
    assert manifest["step"] == 4
    assert manifest["tasks"] == ["task3", "task4"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The log directory of a run of two models that ended after the first."""
    folder = tmp_path_factory.mktemp("begun")
    with pytest.raises(InterruptedRunError):
        algorithm_in(folder).run(pool(2), on_step=interrupt_after(1))
    return folder


def test_damaged_reports_of_layers_begin_anew(tmp_path, begun, caplog):
    for number, content in enumerate([b"", b"\xff\x00", b"a,b\n1", b"step,task\none,two", b'"']):
        folder = shutil.copytree(begun, tmp_path / str(number))
        (folder / "layers.csv").write_bytes(content)
        algorithm_in(folder).run(pool(2))
        assert f"{number}/layers.csv' is damaged" in caplog.text
        assert set(pd.read_csv(folder / "layers.csv")["step"]) == {2}


def damage(folder, how):
    if how == "deleted":
        shutil.rmtree(folder)
        return
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


class Scores(WholePool):
    """Scores that tell which step they are of."""

    def __init__(self):
        super().__init__(["a", "b", "c"])


@pytest.mark.parametrize("how", ["deleted", "one bit"])
@pytest.mark.parametrize("report", ["kept", "lost"])
def test_an_earlier_step_is_not_needed_and_scores_that_are_lost_with_it_are_none(
    tmp_path, how, report, caplog, capsys
):
    models = {name: Counter() for name in ("_pretrained_", "a", "b", "c")}
    options = {"shuffle_order": False, "evaluate": "every_step"}
    whole = logging_to(tmp_path, Counting(**options))
    whole.run(models, Scores())
    damage(tmp_path / "checkpoints" / "merged_model_1", how)
    expected = whole.matrix.rows()
    if report == "lost":
        (tmp_path / "report_1.json").unlink()
        expected[1] = [None] * 3
    resumed = logging_to(tmp_path, Counting(**options))
    resumed.run(models, Scores(), on_step=lambda *_: pytest.fail("a step was made again"))
    assert resumed.matrix.rows() == expected
    assert ("the scores of step 2 are lost" in caplog.text) == (report == "lost")


def test_a_report_that_is_lost_is_made_of_its_step_as_are_those_of_a_run_without_scores(tmp_path):
    models = {name: Counter() for name in ("_pretrained_", "a", "b", "c")}
    options = {"shuffle_order": False, "evaluate": "every_step"}
    logging_to(tmp_path, Counting(**options)).run(models)
    scored = logging_to(tmp_path, Counting(**options))
    scored.run(models, Scores(), on_step=lambda *_: pytest.fail("a step was made again"))
    assert [row[0] for row in scored.matrix.rows()] == [1, 1 / 2, 1 / 3]
    (tmp_path / "report_0.json").write_text("{")
    again = logging_to(tmp_path, Counting(**options))
    again.run(models, Scores())
    assert again.matrix.rows() == scored.matrix.rows()


def test_a_task_pool_that_fails_is_no_report_that_is_lost(tmp_path):
    models = {name: Counter() for name in ("_pretrained_", "a", "b", "c")}
    options = {"shuffle_order": False, "evaluate": "every_step"}
    logging_to(tmp_path, Counting(**options)).run(models)
    taskpool = Scores()
    evaluate = taskpool.evaluate

    def fail_at_first(model):
        if not taskpool.calls:
            taskpool.calls.append(0)
            raise ValueError("no memory for the data")
        return evaluate(model)

    taskpool.evaluate = fail_at_first
    with pytest.raises(ValueError, match="no memory for the data"):
        logging_to(tmp_path, Counting(**options)).run(models, taskpool)


def merged_onto(folder, models, **options):
    """Merge task2 onto the step of task1 that is in a folder."""
    rest = {key: models[key] for key in ("_pretrained_", "task2")}
    rest = saved_pool(folder / "models", rest, _merged_=folder / "checkpoints" / "merged_model_0")
    return NufiltContinualMergingAlgorithm(**SMALL, **options).run(rest)


def test_a_merge_that_was_changed_is_not_gone_on_from_unless_the_user_knows(tmp_path, begun):
    models = pool(2)
    step = shutil.copytree(begun, tmp_path, dirs_exist_ok=True) / "checkpoints" / "merged_model_0"
    merged_onto(tmp_path, models)
    weights = (step / "model.safetensors").read_bytes()
    changed = {
        key: value * (1 + 1e-7) for key, value in load_file(step / "model.safetensors").items()
    }
    save_file(changed, step / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"is not what was saved .*method\.verify=false goes on"):
        merged_onto(tmp_path, models)
    (step / "model.safetensors").write_bytes(weights)
    config = json.loads((step / "config.json").read_text())
    (step / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    with pytest.raises(ValueError, match=r"is not what was saved .*method\.verify=false goes on"):
        merged_onto(tmp_path, models)
    merged_onto(tmp_path, models, verify=False)


#: What may be another in a command, and what it is told: options before data are loaded, all but
#: weights before a model is.
CHANGED = {
    "seed is 42 there and 43 here": {"seed": 43},
    "null_rank is 6 there and 5 here": {"null_rank": 5},
    "lora_rank is 4 there and 3 here": {"lora_rank": 3},
    "task_rank is 3 there and 2 here": {"task_rank": 2},
    "max_steps is 5 there and 6 here": {"max_steps": 6},
    "lr is 0.001 there and 0.01 here": {"lr": 0.01},
    "ridge is 10.0 there and 5.0 here": {"ridge": 5.0},
    'solver is "adam" there and "closed_form" here': {"solver": "closed_form"},
    "null_space is true there and false here": {"null_space": False},
    'other_params is "mean" there and "first" here': {"other_params": "first"},
    'heads is "auto" there and "none" here': {"heads": "none"},
    "target_modules is ": {"target_modules": "all-linear"},
    "exclude_modules is ": {"exclude_modules": ["fc1"]},
    'evaluate is "diagonal" there and "last" here': {"evaluate": "last"},
    r"order is .*task1.* there and .*task2.*task1": {"shuffle_order": True},
    'method is "NUFILT" there and "task arithmetic': {"layer_method": "sum"},
    "order is .*; model 'task3' is null there": {"models": 3},
    "scored is ": {"fast_dev_run": True},
    "test_data.*task1": {"test_data": [1, 2]},
    "model 'task1' is not the same": {"weights": 0.01},
}


def test_another_command_in_the_same_folder_is_told_what_differs(tmp_path, monkeypatch):
    """And those options that are of the process are none of it."""
    models = pool(3)
    two = {name: models[name] for name in ("_pretrained_", "task1", "task2")}
    algorithm_in(tmp_path / "run").run(saved_pool(tmp_path, two), Weights())

    def run(changed):
        taskpool = Weights()
        taskpool.fast_dev_run = changed.pop("fast_dev_run", False)
        if "test_data" in changed:
            data = {"task1": changed.pop("test_data")}
            taskpool.load_test_data = lambda: data
        named = models if changed.pop("models", 2) == 3 else two
        with torch.no_grad():
            next(models["task1"].parameters()).add_(changed.pop("weights", 0))
        modelpool = saved_pool(tmp_path, named)
        if "layer_method" in changed:
            algorithm = LayerwiseMergingAlgorithm("sum", shuffle_order=False, other_params="mean")
            algorithm = logging_to(tmp_path / "run", algorithm)
        else:
            algorithm = algorithm_in(tmp_path / "run", **changed)
        algorithm.run(modelpool, taskpool, on_step=lambda *_: pytest.fail("a step was made"))

    run({"save_on_every_step": False, "check_models": False, "verify": False})
    before = contents(tmp_path / "run")
    for told, changed in CHANGED.items():
        with monkeypatch.context() as patch:
            if "weights" not in changed:
                patch.setattr(CLIPVisionModelPool, "load_model", pytest.fail)
            if changed.keys().isdisjoint({"weights", "fast_dev_run", "test_data"}):
                patch.setattr(Weights, "load_test_data", pytest.fail)
            with pytest.raises(ValueError, match=rf"holds another run: .*{told}"):
                run(dict(changed))
    assert contents(tmp_path / "run") == before
