"""The `nufilt` command."""

import re
import tomllib

import pytest
from typer.testing import CliRunner

from fusion_bench_nufilt.cli import app
from tests.conftest import REPO
from tests.folders.helpers import RANKS, merge, same, save_stream, tensors
from tests.models import llama, llava

FLAGS = [part for key, value in RANKS.items() for part in (f"--{key.replace('_', '-')}", str(value))]


def nufilt(*arguments):
    """Exit code and what was printed, without line breaks and styles."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", result.output))


@pytest.mark.parametrize("make", [llama, llava])
def test_a_stream_and_one_more_model(tmp_path, make):
    save_stream(tmp_path, make())
    base, one, two, three = ("--base", tmp_path / "base"), *(tmp_path / f"task{i}" for i in (1, 2, 3))
    code, text = nufilt("merge", *base, "--task", one, "--task", two, "--out", tmp_path / "two", *FLAGS)
    assert (code, "step 2, 14 layers merged" in text) == (0, True), text
    code, text = nufilt(
        "merge", *base, "--merged", tmp_path / "two", "--task", three, "--out", tmp_path / "new", *FLAGS
    )
    assert (code, "step 3, 14 layers merged" in text) == (0, True), text
    assert same(tensors(tmp_path / "new"), tensors(merge(tmp_path)))


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    before = sorted(tmp_path.rglob("*"))
    arguments = ("--base", tmp_path / "base", "--task", tmp_path / "task1", "--out", tmp_path / "out", "--dry-run")
    code, text = nufilt("merge", *arguments)
    assert code == 0
    for words in ("14 linear layers", "0 tensors (other_params=pretrained)", "6 tensors, bit by bit", "GB at most"):
        assert words in text
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--null-rank", "-1"], "null_rank must be a whole number"),
        (["--target-modules", "typo"], "'typo' of ['typo'] names no linear layer"),
        (["--target-modules", r".*\.nothing"], "leave no linear layer"),
        (["--max-memory", "lots"], "max_memory must be a size such as 4GB"),
        (["--max-memory", "1MB"], "is below the"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_1(tmp_path, flags, message):
    save_stream(tmp_path, llama(), tasks=1)
    code, text = nufilt(
        "merge", "--base", tmp_path / "base", "--task", tmp_path / "task1", "--out", tmp_path / "out", *flags
    )
    assert code == 1
    assert "error: " in text
    assert message in text
    assert "Traceback" not in text


def test_what_the_system_refuses_is_one_line_too_and_a_dry_run_tells_an_output_that_exists(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    arguments = ("merge", "--base", tmp_path / "base", "--task", tmp_path / "task1")
    (tmp_path / "file").write_text("")
    code, text = nufilt(*arguments, "--out", tmp_path / "file" / "out")
    assert (code, "error: [Errno" in text) == (1, True)
    code, text = nufilt(*arguments, "--out", tmp_path / "base", "--dry-run")
    assert (code, "is inside" in text) == (1, True)
    code, text = nufilt(*arguments, "--out", tmp_path / "file", "--dry-run")
    assert (code, "exists: remove it" in text) == (1, True)


def test_the_name_of_a_folder_is_no_markup(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    out = tmp_path / "[" / "bold]"
    assert nufilt("merge", "--base", tmp_path / "base", "--task", tmp_path / "task1", "--out", out, *FLAGS)[0] == 0


def test_words_choose_layers_as_in_the_yaml(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    arguments = ("--base", tmp_path / "base", "--task", tmp_path / "task1", "--out", tmp_path / "out", "--dry-run")
    words = ("--target-modules", "q_proj", "--target-modules", "mlp", "--exclude-modules", "layers.0")
    assert "4 linear layers" in nufilt("merge", *arguments, *words)[1]
    assert "2 linear layers" in nufilt("merge", *arguments, "--target-modules", r".*v_proj")[1]


# --- nufilt compare ---

QUICK = ("--evaluate", "last", "method.max_steps=1")


def test_a_comparison_ends_with_its_tables_and_files(demo, tmp_path):
    arguments = ("--methods", "nufilt, naive sum=nufilt/naive", "--seeds", "42:44", "--out", tmp_path / "out", *QUICK)
    code, text = nufilt("compare", *arguments)
    assert code == 0, text
    for words in ("naive sum", "pretrained", "8 models merged one after another", "over seeds 42-43", "table.md"):
        assert words in text
    assert "naive sum" in (tmp_path / "out" / "table.md").read_text()
    assert nufilt("compare", *arguments)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "opmc"), "there is no method 'opmc'"),
        (("--methods", "nufilt", "--seeds", "x"), "seeds must be like"),
        (("--methods", "nufilt", "--modelpool", "nothing"), "nothing"),
        (("--methods", "nufilt", "--evaluate", "never"), "evaluate must be one of"),
        (("--preset", "best"), "there is no preset 'best'"),
        ((), "there is no method to compare"),
    ],
)
def test_what_is_wrong_with_a_comparison_is_one_message_and_exit_code_1(tmp_path, arguments, message):
    code, text = nufilt("compare", *arguments, "--out", tmp_path / "out")
    assert code == 1
    assert "error: " in text
    assert message in text
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_one_message_and_exit_code_1(tmp_path):
    (tmp_path / "file").touch()
    code, text = nufilt("compare", "--methods", "nufilt", "--out", tmp_path / "file" / "out", *QUICK)
    assert code == 1
    assert "error: " in text
    assert "Traceback" not in text


def test_a_generic_baseline_says_that_it_needs_a_method(demo, tmp_path):
    code, text = nufilt("compare", "--methods", "batch", "--out", tmp_path / "out", "--evaluate", "last")
    assert code == 1
    assert "batch failed on seed 42: Missing mandatory value: base_method" in " ".join(text.split())


def test_an_interrupted_comparison_says_that_it_goes_on(demo, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("fusion_bench_nufilt.NufiltContinualMergingAlgorithm.merge_step", interrupt)
    code, text = nufilt("compare", "--methods", "nufilt", "--out", tmp_path / "out", *QUICK)
    assert code == 130
    assert "the same command goes on" in text


def test_a_comparison_of_failures_only_is_a_failure(demo, tmp_path):
    code, text = nufilt("compare", "--methods", "nufilt:bogus=1", "--out", tmp_path / "out", *QUICK)
    assert code == 1
    assert "nufilt:bogus=1 failed on seed 42: Could not override 'method.bogus'" in text


def test_the_command_is_installed():
    scripts = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"nufilt": "fusion_bench_nufilt.cli:app"}


@pytest.mark.parametrize(
    ("flag", "choices"),
    [("--other-params", ["pretrained", "first", "mean"]), ("--null-space", ["true", "false", "zero"])],
)
def test_a_word_that_is_no_choice_is_refused_with_the_choices(tmp_path, flag, choices):
    code, text = nufilt("merge", "--base", "b", "--task", "t", "--out", tmp_path / "out", flag, "maybe")
    assert code == 2
    assert all(f"'{choice}'" in text for choice in choices)
