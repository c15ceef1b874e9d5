"""The `nufilt compare` command."""

import re

import pytest

from tests.cli.helpers import nufilt
from tests.merge.helpers import save_stream
from tests.tiny_models import llama

QUICK = ("--evaluate", "last", "method.max_steps=1")


def test_a_comparison_ends_with_its_tables_and_files(demo, tmp_path):
    methods = ("--methods", "naive sum=nufilt/naive", "--seeds", "42:44")
    command = ("compare", *methods, "--out", tmp_path / "out", *QUICK)
    code, text = nufilt(*command)
    assert code == 0, text
    assert "naive sum" in text
    assert "pretrained" in text
    assert "8 models merged one after another" in text
    assert "over seeds 42-43" in text
    assert "table.md" in text
    assert "naive sum" in (tmp_path / "out" / "table.md").read_text()
    assert nufilt(*command)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "opmc"), "there is no method 'opmc'"),
        (("--methods", "nufilt", "--seeds", "x"), "seeds must be like"),
        (("--methods", "nufilt", "--modelpool", "nothing"), "nothing"),
        (("--methods", "nufilt", "--out", "file/out", *QUICK), "file"),
    ],
)
def test_what_is_wrong_with_a_comparison_is_one_message_and_exit_code_1(
    tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    code, text = nufilt("compare", "--out", "out", *arguments)
    assert code == 1, text
    assert "error: " in text
    assert message in text
    assert "Traceback" not in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ("batch", "batch: method.base_method: no value; name a method of FusionBench"),
        (
            "opcm,nufilt:nul_rank=1",
            "'nul_rank=1': there is no option 'nul_rank'; did you mean 'null_rank'?",
        ),
    ],
)
def test_a_method_that_cannot_be_built_is_refused(demo, tmp_path, methods, message):
    options = ("--out", tmp_path / "out", "--evaluate", "last")
    code, text = nufilt("compare", "--methods", methods, *options)
    assert code == 1, text
    assert message in text


@pytest.mark.slow
def test_the_others_are_run_where_that_is_asked_for_and_the_exit_code_tells_that_one_failed(
    demo, tmp_path
):
    methods = ("--methods", "batch,naive sum=nufilt/naive", "--keep-going")
    code, text = nufilt("compare", *methods, "--out", tmp_path / "out", "--evaluate", "last")
    assert code == 1
    rows = (tmp_path / "out" / "table.md").read_text().splitlines()
    for name, message in (("batch", "failed"), ("naive sum", "none")):
        (row,) = [row for row in rows if row.startswith(f"| {name} ")]
        assert message in row, text


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


@pytest.mark.parametrize("words", [("compare", "--methods", "nufilt"), ("analyze",)])
def test_a_folder_with_files_of_the_users_own_is_refused(tmp_path, words):
    (tmp_path / "index.html").write_text("mine")
    code, text = nufilt(*words, "--out", tmp_path)
    assert code == 1
    assert "it has 'index.html' and no" in text
    assert list(tmp_path.iterdir()) == [tmp_path / "index.html"]


def test_an_interrupted_comparison_says_that_it_goes_on(demo, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("fusion_bench_nufilt.NufiltContinualMergingAlgorithm.merge_step", interrupt)
    code, text = nufilt("compare", "--methods", "nufilt", "--out", tmp_path / "out", *QUICK)
    assert code == 130
    assert "the same command goes on" in text


@pytest.mark.parametrize(
    ("option", "choices"),
    [
        ("--evaluate", ["last", "diagonal", "every_step", "every_step_all"]),
        ("--preset", ["ablation", "paper"]),
    ],
)
def test_a_word_that_is_no_choice_is_refused_with_the_choices(option, choices):
    code, text = nufilt("compare", option, "best")
    assert code == 2
    for choice in choices:
        assert f"'{choice}'" in text


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
    code, text = nufilt("compare", "--with-data")
    assert code == 1, text
    assert "--with-data goes with --preset paper" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["~modelpool.models._pretrained_"],
            "the model pool has no '_pretrained_' model, only ['digits', ",
        ),
        (["taskpool=dummy"], "taskpool=dummy scores nothing"),
        (
            ["~modelpool.taskpool"],
            "the model pool brings no task pool, and nothing can be scored: add taskpool=NAME",
        ),
    ],
)
def test_pools_that_cannot_be_compared_are_one_line(demo, tmp_path, words, message):
    options = ("--methods", "nufilt/naive", "--out", tmp_path / "out", *QUICK)
    code, text = nufilt("compare", *options, *words)
    assert code == 1, text
    assert f"error: {message}" in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_a_disk_that_is_full_is_one_line_and_not_a_success(demo, full_disk):
    code, text = nufilt("compare", "--methods", "nufilt/naive", "--out", full_disk, *QUICK)
    assert code == 1, text
    assert f"no room left on the disk for '{full_disk}" in text
    assert "Traceback" not in text


def test_an_analysis_of_another_program_is_refused_and_stays(tmp_path):
    save_stream(tmp_path, llama(), tasks=1)
    files = {"index.html": "mine", "analysis.json": '{"tasks": ["mine"]}'}
    mine = tmp_path / "mine"
    mine.mkdir()
    for name, content in files.items():
        (mine / name).write_text(content)
    models = ("--base", tmp_path / "base", "--task", tmp_path / "task1")
    code, text = nufilt("analyze", *models, "--out", mine)
    assert code == 1, text
    assert "name a new or an empty folder" in text
    assert {path.name: path.read_text() for path in mine.iterdir()} == files
