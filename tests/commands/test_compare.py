"""The `nufilt compare` command."""

import pytest

from tests.commands.helpers import nufilt

QUICK = ("--evaluate", "last", "method.max_steps=1")


def test_a_comparison_ends_with_its_tables_and_files(demo, tmp_path):
    arguments = ("--methods", "naive sum=nufilt/naive", "--seeds", "42:44", "--out", tmp_path / "out", *QUICK)
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
    assert "batch: Missing mandatory value: base_method" in " ".join(text.split())


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
    assert "nufilt:bogus=1: Could not override 'method.bogus'" in text


@pytest.mark.parametrize(
    ("option", "choices"),
    [
        ("--evaluate", ["last", "diagonal", "every_step", "every_step_all"]),
        ("--preset", ["ablation", "sensitivity", "paper"]),
    ],
)
def test_a_word_that_is_no_choice_is_refused_with_the_choices(option, choices):
    code, text = nufilt("compare", option, "best")
    assert code == 2
    assert all(f"'{choice}'" in text for choice in choices)


def test_the_bare_command_compares_nufilt_and_the_baselines_on_the_demo(monkeypatch):
    asked = {}

    def compare(modelpool, specs, seeds, out, **options):
        asked.update(modelpool=modelpool, methods=[spec.label for spec in specs], seeds=seeds)
        raise ValueError("enough")

    monkeypatch.setattr("fusion_bench_nufilt.compare.run.compare", compare)
    assert nufilt("compare")[0] == 1
    assert (asked["modelpool"], asked["seeds"]) == ("nufilt_demo", [42])
    assert {"nufilt", "opcm", "wudi", "task_arithmetic"} <= set(asked["methods"])


def test_methods_that_need_data_are_compared_where_they_are_asked_for(monkeypatch):
    asked = []

    def compare(modelpool, specs, *_, **options):
        asked.append({spec.method for spec in specs})
        raise ValueError("enough")

    monkeypatch.setattr("fusion_bench_nufilt.compare.run.compare", compare)
    for options in ([], ["--with-data"]):
        nufilt("compare", "--preset", "paper", *options)
    assert asked[1] - asked[0] == {"sequential_finetuning", "adamerging", "lora_wemoe"}
    code, text = nufilt("compare", "--with-data")
    assert code == 1
    assert "--with-data goes with --preset paper" in text
