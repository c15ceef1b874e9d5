"""The paper's numbers: where they are shown, and that they were copied right."""

import pytest

from fusion_bench_nufilt.compare.paper import Published, paper_settings, published
from tests.conftest import shared_or_skip
from tests.test_command_line import POOLS

B32 = "clip-vit-base-patch32_TA8"


def test_numbers_are_those_of_the_pool_and_method():
    assert published(B32, [])["nufilt"] == Published(83.6, -2.7)
    assert published("clip-vit-large-patch14_TALL20", [])["opcm"] == Published(76.0)
    assert published("clip-vit-base-patch32_TALL14", [])["nufilt/naive"] == Published(46.5)
    assert published("flan-t5-base_glue", ["method.shuffle_order=false"])["wudi"] == Published(82.2, -3.9)


def test_another_setting_than_the_papers_has_no_number():
    assert published("nufilt_demo", []) == {}
    assert published(B32, ["method.null_rank=21"]) == {}
    assert published(B32, ["~modelpool.models.dtd"]) == {}
    assert published("flan-t5-base_glue", []) == {}  # the paper's order is not a shuffled one
    assert published(B32, ["fabric.accelerator=cpu"])  # a device is no setting


def test_only_fourteen_and_twenty_tasks_are_scaled_differently():
    assert paper_settings(B32) == {}
    assert paper_settings("clip-vit-base-patch16_TALL14") == paper_settings("clip-vit-large-patch14_TALL20") != {}


NAMES = {
    "weight averaging": "weight_average",
    "task arithmetic": "task_arithmetic",
    "TIES": "ties_merging",
    "MagMax-Ind": "magmax",
    "LW AdaMerging (needs data)": "adamerging",
    "KnOTS-TIES": "knots_ties",
    "TSV-M": "tsvm",
    "Iso-C": "iso_c",
    "**NUFILT**": "nufilt",
}


def test_the_table_was_copied_right():
    lines = shared_or_skip("METHOD.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("| ")]
    table = {NAMES.get(row[0], row[0].lower()): row[1:] for row in rows if len(row) == 10}
    for column, pool in enumerate(POOLS):
        printed = {name: number for name, number in published(pool, []).items() if "/" not in name}
        assert {name: f"{number.acc:.1f}" for name, number in printed.items()} == {
            name: table[name][column].strip("*") for name in printed
        }
        assert printed["nufilt"].bwt == pytest.approx(float(table["nufilt bwt"][column].replace("−", "-")))  # noqa: RUF001
