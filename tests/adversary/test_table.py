"""Every bad input is refused by one line that names it, before anything is written, and no input is
touched.
"""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.adversary.conftest import contents
from tests.adversary.entry_points import in_time
from tests.adversary.table import STREAM, Row, rows
from tests.cli.helpers import nufilt
from tests.merge.helpers import RANKS, same, tensors

ROWS = rows()
# The fast tests have the first row of each message; the others are for every night.
FIRST = {row.says: row.name for row in reversed(ROWS)}
CASES = [
    pytest.param(row, id=row.name, marks=[pytest.mark.nightly] * (row.name != FIRST[row.says]))
    for row in ROWS
]
FLAGS = [f"{key}={value}" for key, value in RANKS.items()]


@pytest.fixture
def folder(inputs, monkeypatch):
    monkeypatch.chdir(inputs)
    return inputs


@pytest.mark.parametrize("row", CASES)
def test_it_is_refused_by_name_or_merged_as_if_nothing_were_wrong(
    row: Row, folder, expected, caplog
):
    row.mutation(folder)
    before = contents(folder)
    out = [] if "--out" in row.arguments else ["--out", "out"]
    with in_time():
        code, text = nufilt("merge", "--base", "base", *FLAGS, *row.arguments, *out)
    assert "\x1b" not in text
    ours = {".out.nufilt", ".out.nufilt/.nufilt.lock"}
    if row.says is None or row.says.startswith("~"):
        assert code == 0, text
        assert re.search((row.says or "~")[1:], text + caplog.text), text
        if row.says is None and row.arguments == STREAM:
            assert same(tensors(folder / "out"), expected)
        before.pop(".out.nufilt", None)  # an empty one was taken up
    else:
        assert code in (1, 2), text
        assert re.search(row.says, text), text
        assert os.path.lexists(folder / "out") == ("out" in before)
    after = contents(folder)
    # Found while merging: finished work is kept.
    if re.search("NaN|too large|can't hold|has the norm", text):
        ours |= {name for name in after if Path(name).parts[0] == ".out.nufilt"}
    new = {name for name in after if Path(name).parts[0] != "out"} - before.keys()
    assert new <= ours
    assert {name: after.get(name, ...) for name in before} == before


def test_the_table_is_large_and_no_row_comes_twice():
    assert len(ROWS) >= 350
    assert [name for name, count in Counter(row.name for row in ROWS).items() if count > 1] == []
