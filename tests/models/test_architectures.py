"""The documentation's table of architectures is the one that its command writes."""

import pytest
from transformers import __version__

from tests.models.architectures import BEGIN, END, MODELS, PAGE, cells, replaced


@pytest.fixture
def rows():
    """What the table on the page says, by family."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    _, _, *lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line]
    by_family = {}
    for families, *rest in lines:
        by_family |= dict.fromkeys(families.split(", "), rest)
    return by_family


@pytest.mark.slow
@pytest.mark.skipif(__version__ < "5", reason="the table is of transformers 5")
@pytest.mark.parametrize("family", MODELS)
def test_two_tasks_of_a_family_merge_as_the_table_says(rows, family):
    assert cells(family) == rows[family]


def test_the_table_has_every_family(rows):
    assert rows.keys() == MODELS.keys()


def test_only_the_generated_part_is_replaced():
    page = PAGE.read_text()
    changed = replaced(page, "new")
    assert changed != page
    assert changed.split(BEGIN)[0] == page.split(BEGIN)[0]
    assert changed.endswith(page.split(END)[1])
