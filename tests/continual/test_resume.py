"""An interrupted run goes on with the same result; one more model on top of a merge is the same
thing.
"""

import json
import shutil

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.utils.files import MANIFEST
from fusion_bench_nufilt.utils.manifest import read_whole_checkpoint
from tests.continual.helpers import (
    InterruptedRunError,
    interrupt_after,
    logging_to,
    noting,
    pool,
    saved_pool,
)
from tests.continual.test_evaluation import Counter, Counting, WholePool
from tests.tiny_models import clip, tower

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


def without_times(folder):
    """All that a run leaves behind and that must not depend on when it ran."""
    rows = pd.read_csv(folder / "layers.csv", dtype=str)
    assert (rows["seconds"].astype(float) >= rows["solving_seconds"].astype(float)).all()
    weights = [
        read_whole_checkpoint(path)["files"]
        for path in sorted((folder / "checkpoints").glob("merged_model_*"))
    ]
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("report_*.json"))]
    return rows.drop(columns=["seconds", "solving_seconds"]).to_csv(), weights, reports


@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_run_that_goes_on_has_the_same_bits(tmp_path, step):
    algorithm_in(tmp_path / "whole").run(pool())
    with pytest.raises(InterruptedRunError):
        algorithm_in(tmp_path / "parts").run(pool(), on_step=interrupt_after(step))
    steps = []
    algorithm = algorithm_in(tmp_path / "parts", resume=True)
    algorithm.run(pool(), on_step=noting(steps))
    assert steps == list(range(step + 1, 5))
    assert without_times(tmp_path / "parts") == without_times(tmp_path / "whole")
    assert len(algorithm.merge_seconds) == 4


def test_with_nothing_to_go_on_from_it_starts_at_the_first_step(tmp_path):
    steps = []
    algorithm_in(tmp_path, resume=True).run(pool(2), on_step=noting(steps))
    assert steps == [1, 2]


@pytest.mark.parametrize("file", ["model.safetensors", MANIFEST])
def test_a_damaged_step_is_made_again(tmp_path, file, caplog):
    algorithm_in(tmp_path).run(pool())
    expected = without_times(tmp_path)
    damaged = tmp_path / "checkpoints" / "merged_model_3" / file
    damaged.write_bytes(damaged.read_bytes()[:-10])
    steps = []
    algorithm_in(tmp_path, resume=True).run(pool(), on_step=noting(steps))
    assert steps == [4]
    assert "merged_model_3" in caplog.text
    assert without_times(tmp_path) == expected


def test_scores_of_an_earlier_run_do_not_pass_for_this_ones(tmp_path):
    algorithm_in(tmp_path).run(pool(2))
    (tmp_path / "report_1.json").write_text("{}")  # as a run with scores would have left it
    algorithm_in(tmp_path).run(pool(2))
    assert not list(tmp_path.glob("report_*.json"))


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"seed": 43}, "seed"), ({"null_rank": 5}, "null_rank"), ({"evaluate": "last"}, "evaluate")],
)
def test_a_run_with_other_settings_is_not_gone_on_with(tmp_path, settings, named):
    algorithm_in(tmp_path).run(pool(2))
    with pytest.raises(ValueError, match=named):
        algorithm_in(tmp_path, resume=True, **settings).run(pool(2))


def test_other_models_and_other_weights_under_the_same_name_are_not_gone_on_with(tmp_path):
    models = pool(2)
    algorithm_in(tmp_path).run(models)
    with pytest.raises(ValueError, match=r"order is .*; model 'task3' is null there"):
        algorithm_in(tmp_path, resume=True).run(pool(3))
    with torch.no_grad():
        next(models["task1"].parameters()).add_(0.01)
    with pytest.raises(ValueError, match="model 'task1' is not the same"):
        algorithm_in(tmp_path, resume=True).run(models)


def test_of_a_model_that_an_unchecked_run_had_not_read_it_is_said_that_it_may_have_changed(
    tmp_path, caplog
):
    with pytest.raises(InterruptedRunError):
        algorithm_in(tmp_path, check_models=False).run(pool(3), on_step=interrupt_after(2))
    algorithm_in(tmp_path, resume=True).run(pool(3))
    assert "the run that made step 2 had not read task3 yet" in caplog.text


def test_the_same_weights_from_another_place_are_gone_on_with(tmp_path):
    models = pool(3)
    steps = []
    with pytest.raises(InterruptedRunError):
        algorithm_in(tmp_path / "run").run(models, on_step=interrupt_after(2))
    algorithm_in(tmp_path / "run", resume=True).run(
        saved_pool(tmp_path, models), on_step=noting(steps)
    )
    assert steps == [3]


def test_without_checkpoints_there_is_nothing_to_resume():
    with pytest.raises(ValueError, match="save_on_every_step"):
        NufiltContinualMergingAlgorithm(resume=True, save_on_every_step=False)


@pytest.mark.parametrize("by", ["manifest", "number"])
def test_models_merged_onto_a_merge_give_the_bits_of_one_stream(tmp_path, by):
    models = pool()
    whole = algorithm_in(tmp_path / "whole").run(models).state_dict()
    algorithm_in(tmp_path / "first").run(
        {key: models[key] for key in ("_pretrained_", "task1", "task2")}
    )
    checkpoint = tmp_path / "first" / "checkpoints" / "merged_model_1"
    rest = {key: models[key] for key in ("_pretrained_", "task3", "task4")}
    if by == "manifest":
        rest = saved_pool(tmp_path / "models", rest, _merged_=checkpoint)
        earlier_tasks = ["task1", "task2"]
        number = None
    else:
        rest["_merged_"] = type(clip()).from_pretrained(checkpoint)
        earlier_tasks = []
        number = 2
    steps = []
    algorithm = algorithm_in(tmp_path / "rest", num_merged=number)
    merged = algorithm.run(rest, on_step=noting(steps)).state_dict()
    assert steps == [3, 4]
    assert all(torch.equal(value, whole[key]) for key, value in merged.items())
    manifest = read_whole_checkpoint(tmp_path / "rest" / "checkpoints" / "merged_model_3")
    assert manifest["step"] == 4
    assert manifest["tasks"] == [*earlier_tasks, "task3", "task4"]


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"a,b\n1", b"step,task\none,two", b'"'])
def test_damaged_reports_of_layers_begin_anew(tmp_path, content, caplog):
    with pytest.raises(InterruptedRunError):
        algorithm_in(tmp_path).run(pool(2), on_step=interrupt_after(1))
    (tmp_path / "layers.csv").write_bytes(content)
    algorithm_in(tmp_path, resume=True).run(pool(2))
    assert "layers.csv' is damaged" in caplog.text
    assert set(pd.read_csv(tmp_path / "layers.csv")["step"]) == {2}


@pytest.mark.parametrize("kept_rows", [0, -1])
def test_rows_that_the_report_of_the_layers_has_lost_are_named(tmp_path, kept_rows, caplog):
    with pytest.raises(InterruptedRunError):
        algorithm_in(tmp_path).run(pool(2), on_step=interrupt_after(1))
    file = tmp_path / "layers.csv"
    header, *rows = file.read_text().splitlines()
    file.write_text("\n".join([header, *rows[:kept_rows]]))
    algorithm_in(tmp_path, resume=True).run(pool(2))
    missing = -kept_rows or len(rows)
    assert f"layers.csv' has lost {missing} of {len(rows)} layers of step 1" in caplog.text


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
def test_an_earlier_step_that_is_damaged_is_named_and_made_again_where_it_is_needed(
    tmp_path, how, report, caplog
):
    models = {name: Counter() for name in ("_pretrained_", "a", "b", "c")}
    options = {"shuffle_order": False, "evaluate": "every_step"}
    whole = logging_to(tmp_path, Counting(**options))
    whole.run(models, Scores())
    damage(tmp_path / "checkpoints" / "merged_model_1", how)
    if report == "lost":
        (tmp_path / "report_1.json").unlink()
    steps = []
    resumed = logging_to(tmp_path, Counting(**options, resume=True))
    resumed.run(models, Scores(), on_step=noting(steps))
    assert steps == {"kept": [], "lost": [2, 3]}[report]
    assert "step 2: '" in caplog.text
    assert {"kept": "goes on without it", "lost": "it is made again"}[report] in caplog.text
    assert resumed.matrix.rows() == whole.matrix.rows()


def merged_onto(folder, models, **options):
    """Merge task2 onto the step of task1 that is in a folder."""
    rest = {key: models[key] for key in ("_pretrained_", "task2")}
    rest = saved_pool(folder / "models", rest, _merged_=folder / "checkpoints" / "merged_model_0")
    return NufiltContinualMergingAlgorithm(**SMALL, **options).run(rest)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_merge_that_was_changed_is_not_gone_on_from_unless_the_user_knows(tmp_path, file):
    models = pool(2)
    algorithm_in(tmp_path).run({key: models[key] for key in ("_pretrained_", "task1")})
    merged_onto(tmp_path, models)
    path = tmp_path / "checkpoints" / "merged_model_0" / file
    if file == "model.safetensors":
        save_file(
            {key: value * (1 + 1e-7) for key, value in load_file(path).items()},
            path,
            {"format": "pt"},
        )
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_act": "relu"}))
    with pytest.raises(ValueError, match=r"is not what was saved .*method\.verify=false goes on"):
        merged_onto(tmp_path, models)
    merged_onto(tmp_path, models, verify=False)


def test_a_merge_of_another_pretrained_model_is_not_gone_on_from(tmp_path):
    models = pool(2)
    algorithm_in(tmp_path).run({key: models[key] for key in ("_pretrained_", "task1")})
    tower(models["_pretrained_"]).encoder.layers[0].mlp.fc1.weight.data[0, 0] += 1e-4
    with pytest.raises(
        ValueError, match="was merged from another '_pretrained_' model than the pool's"
    ):
        merged_onto(tmp_path, models)


def test_a_step_in_the_place_of_another_is_passed_over(tmp_path, caplog):
    algorithm_in(tmp_path).run(pool(3))
    folder = tmp_path / "checkpoints"
    shutil.rmtree(folder / "merged_model_2")
    shutil.copytree(folder / "merged_model_0", folder / "merged_model_2")
    steps = []
    algorithm_in(tmp_path, resume=True).run(pool(3), on_step=noting(steps))
    assert "step 3: '" in caplog.text
    assert "merged_model_2' is of step 1; looking for the step before" in caplog.text
    assert steps == [3]


def test_how_many_models_are_in_a_merge_must_be_known():
    models = pool(2)
    models["_merged_"] = models.pop("task1")
    with pytest.raises(ValueError, match="num_merged"):
        NufiltContinualMergingAlgorithm(**SMALL).run(models)
    with pytest.raises(ValueError, match="_merged_"):
        NufiltContinualMergingAlgorithm(**SMALL, num_merged=2).run(pool(2))


def test_a_bad_merge_is_refused_before_any_work():
    models = pool(2)
    models["_merged_"] = models.pop("task1")
    tower(models["_merged_"]).encoder.layers[0].mlp.fc1.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"_merged_.*fc1"):
        NufiltContinualMergingAlgorithm(**SMALL, num_merged=1).run(
            models, on_step=lambda *_: pytest.fail("merged")
        )
