"""The documentation's tables of architectures are those that their command writes."""

import re

import pytest
from transformers import __version__

from tests.layers.architectures import BEGIN, MODELS, PAGE, replaced, row


@pytest.mark.slow
@pytest.mark.skipif(__version__ < "5", reason="the table is of transformers 5")
@pytest.mark.parametrize("family", MODELS)
def test_both_tasks_of_a_family_merge_as_its_row_says(family):
    assert row(family) in PAGE.read_text()


def test_the_table_has_every_family():
    table = PAGE.read_text().partition(BEGIN.format("families"))[2].partition("<!-- end")[0]
    assert re.findall(r"^\| (.*?) \|", table, flags=re.M)[2:] == list(MODELS)


def test_only_the_generated_part_is_replaced():
    page = PAGE.read_text()
    changed = replaced(page, "pools", "new")
    assert changed != page
    assert changed.split(BEGIN.format("pools"))[0] == page.split(BEGIN.format("pools"))[0]
    assert changed.endswith(page.split("<!-- end of pools -->")[1])
