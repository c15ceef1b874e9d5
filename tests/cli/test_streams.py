"""Standard output has the result, for people or as JSON; everything else goes to standard error, or
nowhere.
"""

import json

import pytest
from typer.testing import CliRunner

from fusion_bench_nufilt.cli.app import app
from tests.merge.helpers import save_stream
from tests.tiny_models import llama


def streams(*arguments, code=0):
    words = [str(argument) for argument in arguments]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stdout, done.stderr


@pytest.fixture
def models(tmp_path):
    save_stream(tmp_path, llama(), tasks=2)
    return ["--base", tmp_path / "base", "--task", tmp_path / "task1", "--task", tmp_path / "task2"]


def test_a_plan_as_json_says_what_is_read_covered_needed_and_doubtful(models, tmp_path):
    command = ("merge", *models, "--out", tmp_path / "out", "--dry-run")
    out, log = streams(*command, "--json", "--quiet")
    plan = json.loads(out)
    assert log == ""
    assert plan["inputs"] == {
        "base": str(tmp_path / "base"),
        "task 0": str(tmp_path / "task1"),
        "task 1": str(tmp_path / "task2"),
    }
    assert plan["first_step"] == 1
    assert plan["settings"]["method"] == "nufilt"
    assert len(plan["layers"]) == 14
    assert plan["coverage"]["layers"] == 14
    assert min(plan["memory_bytes"], plan["disk_bytes"]) > 0
    (warning,) = plan["warnings"]
    assert "null_rank" in warning
    assert not (tmp_path / "out").exists()


def test_a_plan_is_the_result_of_a_dry_run_also_when_quiet(models, tmp_path):
    command = ("merge", *models, "--out", tmp_path / "out", "--dry-run")
    out, log = streams(*command, "--quiet")
    assert log == ""
    assert "14 layers" in out
    assert "null_rank=" not in out
    _, log = streams(*command)
    assert "null_rank=" in log


def test_quiet_keeps_results_and_errors(models, tmp_path):
    command = ("merge", *models, "--out", tmp_path / "out", "-q")
    assert streams(*command, "max_steps=1") == ("", "")
    assert (tmp_path / "out" / "nufilt.json").is_file()
    out, log = streams(*command, "max_stepz=1", code=1)
    assert out == ""
    assert "did you mean 'max_steps'" in log
    _, log = streams(*command, "--json", code=1)
    assert "--json goes with --dry-run" in log


@pytest.mark.slow
def test_an_analysis_and_a_comparison_as_json_are_their_files(models, demo, tmp_path):
    out, log = streams("analyze", *models, "--out", tmp_path / "analysis", "--json", "-q")
    analysis = (tmp_path / "analysis" / "analysis.json").read_text()
    assert json.loads(out) == json.loads(analysis)
    assert log == ""
    words = ("--methods", "nufilt/naive", "--evaluate", "last", "--out", tmp_path / "compare")
    out, log = streams("compare", *words, "--json", "-q")
    comparison = (tmp_path / "compare" / "results.json").read_text()
    assert json.loads(out) == json.loads(comparison)
    assert log == ""
