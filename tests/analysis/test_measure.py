"""A run is measured if all of its steps are of one run."""

import shutil

import pytest

from fusion_bench_nufilt.analysis.measure import finished_runs
from tests.models import finetuned
from tests.stream.helpers import pool
from tests.stream.test_resume import algorithm_in


@pytest.mark.parametrize("other", ["settings", "models", "number"])
def test_a_step_of_another_run_is_refused_by_name(tmp_path, other):
    models = pool(3)
    algorithm_in(tmp_path / "run").run(models)
    (run,) = finished_runs([tmp_path / "run"])
    assert run.manifest["step"] == 3
    if other == "models":
        models["task1"] = finetuned(models["_pretrained_"], seed=9)
    algorithm_in(tmp_path / "other", **({"null_rank": 5} if other == "settings" else {})).run(
        models
    )
    step, taken = (tmp_path / run / "checkpoints" / "merged_model_1" for run in ("run", "other"))
    shutil.rmtree(step)
    shutil.copytree(taken.with_name("merged_model_0") if other == "number" else taken, step)
    what = {
        "settings": "another null_rank",
        "models": "another model 'task1'",
        "number": "a step of another number",
    }
    with pytest.raises(
        ValueError, match=rf"merged_model_1' has {what[other]} than the step before it"
    ):
        finished_runs([tmp_path / "run"])
