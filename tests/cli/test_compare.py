"""The `nufilt compare` command."""

import re

import pytest

from tests.cli.helpers import nufilt
from tests.compare.test_run import THREE
from tests.merge.helpers import save_stream
from tests.tiny_models import llama

QUICK = ("--evaluate", "last", "method.max_steps=1")


def test_a_comparison_ends_with_its_tables_and_files(demo, tmp_path):
    methods = ("--methods", "naive sum=nufilt/naive", "--seeds", "42:44")
    command = ("compare", *methods, "--out", tmp_path / "out", *QUICK, *THREE)
    code, text = nufilt(*command)
    assert code == 0, text
    assert "3 models merged one after another" in text
    for words in ("naive sum", "pretrained", "over seeds 42-43", "table.md"):
        assert words in text
    assert "naive sum" in (tmp_path / "out" / "table.md").read_text()


def test_what_is_wrong_with_a_comparison_is_one_message_and_exit_code_1(
    demo, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    no_pretrained = "the model pool has no '_pretrained_' model, only ['digits', "
    no_taskpool = "the model pool brings no task pool, and nothing can be scored: add taskpool=NAME"
    no_base_method = "batch: method.base_method: no value; name a method of FusionBench"
    no_option = "'nul_rank=1': there is no option 'nul_rank'; did you mean 'null_rank'?"
    for words, message in (
        (("opmc",), "there is no method 'opmc'"),
        (("nufilt", "--seeds", "x"), "seeds must be like"),
        (("nufilt", "--modelpool", "nothing"), "nothing"),
        (("nufilt", "--out", "file/out"), "file"),
        (("batch",), no_base_method),
        (("opcm,nufilt:nul_rank=1",), no_option),
        (("nufilt/naive", "~modelpool.models._pretrained_"), f"error: {no_pretrained}"),
        (("nufilt/naive", "taskpool=dummy"), "error: taskpool=dummy scores nothing"),
        (("nufilt/naive", "~modelpool.taskpool"), f"error: {no_taskpool}"),
        (("nufilt", "--with-data"), "--with-data goes with --preset paper"),
    ):
        code, text = nufilt("compare", "--out", "out", "--evaluate", "last", "--methods", *words)
        assert code == 1, text
        assert "error: " in text
        assert message in text
        assert not (tmp_path / "out").exists(), words


FAILING = "broken=opcm:base_method.alpha=much"  # is first computed with in the second step


@pytest.mark.slow
def test_a_row_that_fails_leaves_the_others_and_ends_the_command_with_its_reason_and_code_1(
    demo, tmp_path
):
    methods = f"{FAILING}, weight_average"
    options = ("--out", tmp_path / "out", "--evaluate", "last", "--quiet", "--json")
    code, text = nufilt("compare", "--methods", methods, *options)
    assert code == 1
    assert re.search(r"error: .* broken, seed 42: TypeError: .*$", text)
    rows = (tmp_path / "out" / "table.md").read_text()
    assert re.search(r"\| weight_average +\| +\d", rows)
    assert re.search(r"\| broken +\| +failed", rows)


@pytest.mark.slow
def test_a_method_that_fails_in_an_analysis_ends_it_with_its_reason_and_code_1(demo, tmp_path):
    options = ("--out", tmp_path / "out", "--quiet", "--json")
    code, text = nufilt("analyze", "--methods", f"{FAILING}, weight_average", *options)
    assert code == 1
    assert re.search(r"error: .* broken: TypeError: .*$", text)
    assert "weight_average" in (tmp_path / "out" / "analysis.json").read_text()


def test_what_is_analysed_is_not_written_to(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    (tmp_path / "base" / "analysis.json").write_text("{}")
    models = ("--base", tmp_path / "base", "--task", tmp_path / "task1")
    places = {"base": "is", "base/new": "is inside", "task1/new/one": "is inside"}
    for out, place in places.items():
        model = tmp_path / out.partition("/")[0]
        before = sorted(model.rglob("*"))
        code, text = nufilt("analyze", *models, "--out", tmp_path / out)
        assert code == 1, text
        assert f"{out}' {place} model '" in text
        assert f"{model.name}', which is not written to" in text
        assert sorted(model.rglob("*")) == before


def test_a_folder_with_files_of_the_users_own_is_refused(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    models = ("--base", tmp_path / "base", "--task", tmp_path / "task1")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "index.html").write_text("mine")
    for words in (("compare", "--methods", "nufilt"), ("analyze",)):
        code, text = nufilt(*words, "--out", mine)
        assert code == 1
        assert "it has 'index.html' and no" in text
    analysis = '{"tasks": ["mine"]}'  # of another program
    (mine / "analysis.json").write_text(analysis)
    code, text = nufilt("analyze", *models, "--out", mine)
    assert code == 1, text
    assert "name a new or an empty folder" in text
    files = {path.name: path.read_text() for path in mine.iterdir()}
    assert files == {"index.html": "mine", "analysis.json": analysis}


def test_an_interrupted_comparison_says_that_it_goes_on(demo, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("fusion_bench_nufilt.NufiltContinualMergingAlgorithm.merge_step", interrupt)
    code, text = nufilt("compare", "--methods", "nufilt", "--out", tmp_path / "out", *QUICK)
    assert code == 130
    assert "the same command goes on" in text


def test_a_word_that_is_no_choice_is_refused_with_the_choices():
    for option, choices in (
        ("--evaluate", ["last", "diagonal", "every_step", "every_step_all"]),
        ("--preset", ["ablation", "paper"]),
    ):
        code, text = nufilt("compare", option, "best")
        assert code == 2
        assert [choice for choice in choices if f"'{choice}'" not in text] == []


@pytest.fixture
def asked(monkeypatch):
    """What the last comparison was asked for; none is run."""
    asked = {}

    def compare(modelpool, specs, seeds, out, **options):
        asked.update(modelpool=modelpool, methods={spec.method for spec in specs}, seeds=seeds)
        raise ValueError("enough")

    monkeypatch.setattr("fusion_bench_nufilt.compare.run.compare", compare)
    return asked


def test_the_bare_command_compares_nufilt_and_the_baselines_on_the_demo(asked):
    assert nufilt("compare")[0] == 1
    assert (asked["modelpool"], asked["seeds"]) == ("nufilt_demo", [42])
    assert {"nufilt", "opcm", "wudi", "task_arithmetic"} <= asked["methods"]


def test_methods_that_need_data_are_compared_where_they_are_asked_for(asked):
    nufilt("compare", "--preset", "paper")
    before = asked["methods"]
    nufilt("compare", "--preset", "paper", "--with-data")
    assert asked["methods"] - before == {"sequential_finetuning", "adamerging", "lora_wemoe"}


@pytest.mark.slow
def test_a_disk_that_is_full_is_one_line_and_not_a_success(demo, full_disk):
    code, text = nufilt("compare", "--methods", "nufilt/naive", "--out", full_disk, *QUICK)
    assert code == 1, text
    assert f"no room left on the disk for '{full_disk}" in text
    assert "Traceback" not in text
