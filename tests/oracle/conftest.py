"""What was drawn and compared, how often, and at what rate."""

import time
from collections import Counter

import pytest

from tests.oracle.cases import Case, kinds_of
from tests.oracle.checks import COMPARED
from tests.oracle.draw import KINDS

#: How often a kind of a column was drawn, by all processes.
DRAWN: Counter[tuple[str, str]] = Counter()
#: After so many cases, a kind that none of them has is a defect of the drawing.
ENOUGH = 500
BEGIN = time.monotonic()
CASES = ("cases", "all")


def drawn(case: Case) -> None:
    """Count a case that was checked."""
    DRAWN.update(set(kinds_of(case)))
    DRAWN[CASES] += 1


def missing_kinds() -> list[str]:
    """Return the kinds that never occurred among enough cases."""
    if DRAWN[CASES] < ENOUGH:
        return []
    return [f"{column} {kind}" for column, kind in KINDS if not DRAWN[column, kind]]


def table() -> list[str]:
    """Return the lines of the table of kinds."""
    columns: dict[str, list[str]] = {}
    for (column, kind), count in sorted(DRAWN.items()):
        columns.setdefault(column, []).append(f"{kind} {count}")
    lines = [f"{column:8} {', '.join(kinds)}" for column, kinds in columns.items()]
    compared = [f"{what} {count}" for what, count in COMPARED.most_common()]
    return [*lines, f"compared {', '.join(compared)}"]


def pytest_sessionfinish(session):
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # of a process of several
        output["oracle"] = [[*kind, count] for kind, count in DRAWN.items()]
        output["compared"] = dict(COMPARED)
    elif missing_kinds():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    output = getattr(node, "workeroutput", {})
    for column, kind, count in output.get("oracle", []):
        DRAWN[column, kind] += count
    COMPARED.update(output.get("compared", {}))


def pytest_terminal_summary(terminalreporter, config):
    if not DRAWN[CASES] or "oracle" not in config.getoption("markexpr"):
        return
    if "not oracle" in config.getoption("markexpr").replace("oracle or not oracle", ""):
        return
    minutes = (time.monotonic() - BEGIN) / 60
    terminalreporter.section("what was drawn")
    terminalreporter.write_line("\n".join(table()))
    terminalreporter.write_line(f"{DRAWN[CASES] / minutes:.0f} cases a minute")
    for kind in missing_kinds():
        terminalreporter.write_line(f"never drawn: {kind}")
