"""What the tables say, and how they mark it."""

import io
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from fusion_bench_nufilt.compare.specs import parse_methods
from fusion_bench_nufilt.pages.comparison import comparison_outputs
from fusion_bench_nufilt.pages.comparison_tables import main_table, task_table
from tests.compare.helpers import SCORES, comparison, failed, final, finished
from tests.pages.sizes import sensitivity_of

SEEDS = (42, 43, 44)
B32 = "clip-vit-base-patch32_TA8"


def runs(change, **options):
    return [finished(seed, change, **options) for seed in SEEDS]


def cells(table):
    """By the name of the row, then of the column: the words, and their rank as ``best``, ``second``
    or nothing.
    """
    by_method = {}
    for method, *words in rows_of(table):
        by_column = {}
        for column, word in zip(table.texts.columns, words, strict=True):
            mark, _, text = word.rpartition(": ")
            by_column[column] = SimpleNamespace(text=text, mark=mark)
        by_method[method] = by_column
    return by_method


@pytest.fixture
def three():
    return comparison({"worst": runs(-0.2), "best_one": runs(-0.1), "good": runs(-0.15)})


def test_methods_have_mean_and_deviation_with_the_best_two_marked_and_single_models_their_mean(
    three,
):
    table = cells(main_table(three))
    for column, text in (("ACC %", "50.0 ± 0.0"), ("BWT %", "-15.0 ± 0.0")):
        marks = [table[name][column].mark for name in ("worst", "good", "best_one")]
        assert marks == ["", "second", "best"]
        assert table["best_one"][column].text == text
    assert table["pretrained"]["ACC %"].text == "25.0"
    assert table["individual"]["ACC %"].text == "95.0"


def test_ranks_have_the_digits_that_are_printed():
    """Both read 60.2, and the second one is larger."""
    measured = {}
    for name, score in (("one", 0.60246), ("two", 0.6025), ("three", 0.59)):
        measured[name] = runs(0, scores=dict.fromkeys("abc", score))
    table = cells(main_table(comparison(measured)))
    assert [table[name]["ACC %"].text[:4] for name in measured] == ["60.2", "60.2", "59.0"]
    assert [table[name]["ACC %"].mark for name in measured] == ["best", "best", "second"]


LACKING = {"a": 0.85, "b": 0.75, "c": float("nan")}


def test_a_method_that_lacks_a_score_is_not_ranked_and_says_of_how_many_tasks_its_mean_is():
    measured = {
        "lacking": runs(0, scores=LACKING),
        "whole": runs(0, scores={"a": 0.9, "b": 0.8, "c": 0.3}),
        "other": runs(0, scores={"a": 0.9, "b": 0.8, "c": 0.2}),
    }
    result = comparison(measured)
    table = main_table(result)
    row = cells(table)
    assert row["lacking"]["ACC %"].text == "80.0 ± 0.0 (2 of 3 tasks)"
    assert row["lacking"]["BWT %"].text.endswith(" (1 of 2 tasks)")
    assert [row[name]["ACC %"].mark for name in measured] == ["", "best", "second"]
    assert {cell.mark for cell in row["lacking"].values()} == {""}
    assert any("lack no score" in note for note in table.notes)


def test_single_models_say_of_how_many_tasks_their_mean_is():
    references = {
        "pretrained": {"a": 0.2, "b": None, "c": 0.4},
        "individual": dict.fromkeys("abc", 0.9),
    }
    table = cells(main_table(replace(comparison({"m": runs(0)}), references=references)))
    assert table["pretrained"]["ACC %"].text == "30.0 (2 of 3 tasks)"
    assert table["individual"]["ACC %"].text == "90.0"


def test_a_task_without_a_score_on_one_seed_says_of_how_many_seeds_its_mean_is():
    lacking = [*runs(0)[:2], finished(44, scores={**SCORES, "b": float("nan")})]
    measured = {"lacking": lacking, "whole": runs(-0.1)}
    table = cells(task_table(comparison(measured)))
    assert table["lacking"]["b"].text == "60.0 ± 0.0 (2 of 3 seeds)"
    assert table["lacking"]["b"].mark == ""
    assert table["lacking"]["a"].mark == "best"
    # Of the seeds, the one with the fewest tasks.
    assert cells(main_table(comparison(measured)))["lacking"]["ACC %"].text.endswith(
        "(2 of 3 tasks)"
    )


def test_the_values_that_the_ranks_preset_ends_with_can_be_typed_and_are_no_joint_optimum():
    note = next(
        note
        for note in main_table(sensitivity_of(3, preset="ranks")).notes
        if note.startswith("highest ACC of each panel: null_rank=0.9999, lora_rank=0.1667")
    )
    assert "each was varied alone" in note
    assert "they are no joint optimum" in note
    typed = re.search(r"score (nufilt:\S+)", note)[1]
    assert parse_methods(typed)[0].settings[:2] == ("null_rank=0.9999", "lora_rank=0.1667")


def test_a_failed_method_says_so_with_its_reason_and_is_never_the_best():
    measured = {
        "good": runs(-0.1),
        "other": runs(-0.2),
        "partly": [finished(42), failed(43, "ValueError: no"), failed(44, "ValueError: no")],
        "never": [failed(seed, "gone") for seed in SEEDS],
    }
    table = main_table(comparison(measured))
    row = cells(table)
    partly = row["partly"]
    assert (partly["ACC %"].text, partly["ACC %"].mark, partly["runs"].text) == ("60.0", "", "1/3")
    assert row["never"]["ACC %"].text == "failed"
    assert row["good"]["ACC %"].mark == "best"
    assert table.notes[-2:] == [
        "partly failed on seeds 43-44: ValueError: no",
        "never failed on seeds 42-44: gone",
    ]


def test_every_row_says_which_data_and_which_extra_parameters_a_method_needs():
    measured = {
        "sequential_finetuning": runs(-0.1, extra_parameters=0),
        "lora_wemoe": runs(-0.1, extra_parameters=47_259_648),
        "nufilt": runs(-0.2, extra_parameters=0),
        "of an earlier version": runs(-0.3),
    }
    table = cells(main_table(comparison(measured)))
    marks = [table[name]["ACC %"].mark for name in measured]
    assert marks == ["", "", "best", "second"]  # references are none of these
    needs = [(row["extra params"].text, row["data"].text) for row in table.values()]
    assert needs == [
        ("", ""),
        ("", ""),
        ("none", "training"),
        ("47.3 M", "unlabelled"),
        ("none", "none"),
        ("-", "none"),
    ]


def test_each_tasks_score_is_in_its_own_column(three):
    table = cells(task_table(three))
    assert list(table["good"]) == ["a", "b", "c"]
    assert table["individual"]["a"].text == "95.0"
    assert table["best_one"]["b"].text == final(three, "best_one", "b").percent()


def test_notes_say_what_the_numbers_are_of(three):
    first, *notes = main_table(three).notes
    assert first == "some_pool: 3 tasks; mean ± standard deviation (of n - 1) over seeds 42-44"
    assert "torch 2.13.0, device cpu" in notes
    one = main_table(comparison({"m": [finished(7)]}, overrides=["taskpool=x"]))
    assert one.notes[:3] == [
        "some_pool: 3 tasks; seed 7",
        "scored on all test data",
        "with taskpool=x",
    ]
    assert cells(one)["m"]["ACC %"].text == "60.0"


def test_a_missing_task_is_a_dash_and_named():
    table = task_table(comparison({"m": runs(0, scores={"a": 0.9, "b": float("nan"), "c": 0.3})}))
    assert cells(table)["m"]["b"].text == "-"
    assert "no score, and not in the means: b" in table.notes


def test_html_in_a_name_is_text_in_markdown():
    name = "<img src=x onerror=alert(1)>|b"
    escaped = r"&lt;img src=x onerror=alert(1)&gt;\|b"
    for table in (task_table(two_methods([name, "other"])), main_table(two_methods([name, "b"]))):
        assert "<img" not in table.as_markdown()
    assert escaped in task_table(two_methods([name, "other"])).as_markdown()


def test_markdown(three):
    text = main_table(three).as_markdown()
    rows = []
    for line in text.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.split("|")[1:-1]])
    assert rows[0][:3] == ["method", "ACC %", "BWT %"]
    assert rows[1][1].endswith(":")  # numbers are on the right
    assert ["best_one", "**50.0 ± 0.0**"] in [row[:2] for row in rows]
    assert ["good", "<ins>45.0 ± 0.0</ins>"] in [row[:2] for row in rows]


def test_ten_seeds_of_three_tasks_say_how_many_orders_they_are():
    ten = [finished(seed) for seed in range(42, 52)]
    orders = {tuple(run.tasks) for run in ten}
    assert len(orders) < 10
    result = comparison({"m": ten})
    assert result.orders == len(orders)
    first = main_table(result).notes[0]
    assert first.endswith(f"over seeds 42-51, which are {len(orders)} orders of the tasks")
    # The text below the title of the page counts the orders, too.
    page = comparison_outputs(result, None).page
    assert f"{len(orders)} task orders" in page
    assert "10 task orders" not in page


def test_latex_is_escaped_and_marked(three):
    text = main_table(three).as_latex()
    assert r"best\_one & \textbf{50.0 $\pm$ 0.0} & \textbf{$-$15.0 $\pm$ 0.0}" in text
    assert r"\underline{45.0 $\pm$ 0.0}" in text
    assert r"some\_pool: 3 tasks; mean $\pm$ standard deviation (of n - 1) over seeds 42-44" in text
    assert "best (bold) and second best (underlined)" in re.search(r"\\caption\{(.*)\}", text)[1]
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len({line.count(" & ") for line in rows}) == 1


def test_the_terminal_shows_labels_as_they_are():
    console = Console(file=io.StringIO(), width=120)
    console.print(main_table(comparison({"[bold]x": runs(0)})).as_rich())
    assert "[bold]x" in console.file.getvalue()


def test_a_task_that_nobody_has_a_score_of_is_no_column():
    missing = {"a": 0.9, "b": float("nan"), "c": 0.3}
    reference = {"a": 0.2, "b": None, "c": 0.1}
    references = {"pretrained": reference, "individual": reference}
    found = replace(comparison({"m": runs(0, scores=missing)}), references=references)
    assert task_table(found).header == ["method", "a", "c"]


#: Columns of tables and files, metrics, and names of rows.
FIXED_NAMES = (
    *("method", "seed", "label", "step", "task", "metric", "value", "runs", "data"),
    *("ACC", "BWT", "ACC %", "iterations", "pretrained"),
)


def test_a_task_may_be_called_like_anything_else_in_the_tables():
    called_so = two_methods(FIXED_NAMES)
    usual = two_methods([f"task{number}" for number in range(len(FIXED_NAMES))])
    for table_of in (main_table, task_table):
        assert rows_of(table_of(called_so)) == rows_of(table_of(usual))
    table = task_table(called_so)
    header = ["method", *FIXED_NAMES]
    assert table.header == header
    line = table.as_markdown().splitlines()[2]
    assert [cell.strip() for cell in line.split("|")[1:-1]] == header
    assert " & ".join(header).replace("%", r"\%") in table.as_latex()


def two_methods(tasks):
    scores = dict.fromkeys(tasks, 0.6)
    measured = {"good": runs(-0.01, scores=scores), "bad": runs(-0.02, scores=scores)}
    return comparison(measured, tasks=list(tasks))


def rows_of(table):
    return table.rows("best: {}", "second: {}", str)


def test_a_row_says_how_many_tensors_the_method_changed_and_which_share_of_the_parameters():
    measured = {
        "nufilt": runs(-0.1, changed_tensors=15, changed_share=0.614),
        "opcm": runs(-0.2, changed_tensors=55, changed_share=1.0),
        "never": [failed(seed) for seed in SEEDS],
    }
    result = comparison(measured)
    table = main_table(result)
    row = cells(table)
    assert [row[name]["changed"].text for name in measured] == ["15 (61 %)", "55 (100 %)", "-"]
    assert row["pretrained"]["changed"].text == ""
    assert table.notes[-1].startswith("changed: how many tensors")


def test_seconds_of_data_are_a_column_of_their_own():
    measured = {"nufilt": runs(-0.1), "adamerging": runs(-0.2, data_seconds=4.0)}
    row = cells(main_table(comparison(measured, preset="overhead")))
    for title, seconds in (
        ("merging s", ["3.0", "3.0"]),
        ("data set-up s", ["-", "4.0"]),
        ("total s", ["3.0", "7.0"]),
    ):
        assert [row[name][title].text for name in measured] == seconds


def test_a_metric_of_unknown_scale_is_shown_for_its_task_and_is_in_no_mean():
    scores = {"a": 0.9, "b": float("nan"), "c": 0.3}
    points = []
    for seed, value in ((42, 11.0), (43, 13.0)):
        points.append(finished(seed, scores=scores, unaveraged={"b": {"points": value}}))
    result = comparison({"m": points})
    assert cells(task_table(result))["m"]["b"].text == "points 12 ± 1.4"
    assert cells(main_table(result))["m"]["ACC %"].text.startswith("60.0")
    assert final(result, "m", "b").count == 0


def test_one_model_is_not_said_to_be_merged_after_another():
    result = comparison({"m": [finished(42, scores={"a": 0.9})]}, tasks=["a"])
    assert main_table(result).title == "1 model merged"
    assert result.stream == "1 model merged"
