"""The documentation's table of architectures is the one that its command writes."""

import pytest

from tests.layers.architectures import BEGIN, PAGE, models_table, replaced


@pytest.mark.slow
def test_the_table_of_models_is_current():
    page = PAGE.read_text()
    assert BEGIN.format("models") in page
    assert replaced(page, "models", models_table()) == page


def test_only_the_generated_part_is_replaced():
    page = PAGE.read_text()
    changed = replaced(page, "pools", "new")
    assert changed != page
    assert changed.split(BEGIN.format("pools"))[0] == page.split(BEGIN.format("pools"))[0]
    assert changed.endswith(page.split("<!-- end of pools -->")[1])
