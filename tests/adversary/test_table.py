"""Every bad input is refused by one line that names it, before anything is written, and no input is
touched.
"""

import contextlib
import io
import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fusion_bench_nufilt.cli.app import app
from tests.adversary.conftest import COUNTS, contents, expect
from tests.adversary.table import STREAM, Row, rows
from tests.merge.helpers import RANKS, same, tensors

ROWS = rows()
# The fast tests have the first row of each message; the others are for every night.
FIRST = {row.says: row.name for row in reversed(ROWS)}
CASES = [
    pytest.param(row, id=row.name, marks=[pytest.mark.nightly] * (row.name != FIRST[row.says]))
    for row in ROWS
]
FLAGS = [f"{key}={value}" for key, value in RANKS.items()]
SECONDS = 120  # after which a row counts as a hang, on a busy machine too


@pytest.fixture
def folder(inputs, monkeypatch):
    monkeypatch.chdir(inputs)
    return inputs


@contextlib.contextmanager
def in_time():
    def hang(number, frame):
        expect(False, "hangs", f"not done after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def nufilt_merge(row):
    """Exit code, and what was printed, without line breaks and styles."""
    out = [] if "--out" in row.arguments else ["--out", "out"]
    with in_time(), contextlib.redirect_stdout(io.StringIO()):
        result = CliRunner().invoke(app, ["merge", "--base", "base", *FLAGS, *row.arguments, *out])
    clean = result.exception is None or isinstance(result.exception, SystemExit | AssertionError)
    expect(clean and "Traceback" not in result.output, "tracebacks", repr(result.exception))
    return result.exit_code, re.sub(r"\s+", " ", re.sub(r"\x1b\[[\d;]*m", "", result.output))


@pytest.mark.parametrize("row", CASES)
def test_it_is_refused_by_name_or_merged_as_if_nothing_were_wrong(
    row: Row, folder, expected, caplog
):
    row.mutation(folder)
    before = contents(folder)
    COUNTS["cases"] += 1
    code, text = nufilt_merge(row)
    assert "\x1b" not in text
    ours = {".out.nufilt/.nufilt.lock"}
    if row.says is None or row.says.startswith("~"):
        assert code == 0, text
        assert re.search((row.says or "~")[1:], text + caplog.text), text
        if row.says is None and row.arguments == STREAM:
            expect(same(tensors(folder / "out"), expected), "wrong results", row.name)
        before.pop(".out.nufilt", None)  # an empty one was taken up
        COUNTS["merged as if nothing were wrong"] += 1
    else:
        assert code in (1, 2), text
        assert re.search(row.says, text), text
        assert os.path.lexists(folder / "out") == ("out" in before)
        COUNTS["clean refusals"] += 1
    after = contents(folder)
    if re.search(
        "NaN|too large|can't hold|has the norm", text
    ):  # found while merging: finished work is kept
        ours |= {name for name in after if Path(name).parts[0] == ".out.nufilt"}
    new = {name for name in after if Path(name).parts[0] != "out"} - before.keys()
    untouched = all(after.get(name, ...) == content for name, content in before.items())
    expect(
        untouched and new <= ours | {".out.nufilt"}, "inputs or foreign files changed", sorted(new)
    )


def test_the_table_is_large_and_no_row_comes_twice():
    assert len(ROWS) >= 400
    assert [name for name, count in Counter(row.name for row in ROWS).items() if count > 1] == []
