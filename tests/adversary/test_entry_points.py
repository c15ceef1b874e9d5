"""Every option of every entry point, spoilt: one line that names it, or nothing is wrong. Fields of
files are spoilt in tests/test_received_folders.py.
"""

import os
from datetime import date

import pytest

from tests.adversary.cases import cases
from tests.adversary.conftest import contents
from tests.adversary.entry_points import FINE, in_time, sample

FAST, NIGHTLY = 50, 1000  # cases


@pytest.fixture
def checks_only(monkeypatch, inputs):
    """Nothing behind an entry point is done."""

    def enough(*_, **__):
        raise ValueError("enough: it would run")

    monkeypatch.setattr("fusion_bench_nufilt.compare.run.compose_run", enough)
    monkeypatch.setattr("fusion_bench_nufilt.compare.configs.compose_run", enough)
    monkeypatch.chdir(inputs)


@pytest.mark.usefixtures("checks_only")
@pytest.mark.parametrize(
    "count",
    [pytest.param(FAST, marks=pytest.mark.slow), pytest.param(NIGHTLY, marks=pytest.mark.nightly)],
)
def test_bad_options_are_refused_by_name_or_do_nothing(inputs, count):
    seed = 0
    if count == NIGHTLY:  # others every night
        seed = int(os.environ.get("NUFILT_SEED", date.today().toordinal()))
    faults = []
    for case in sample(cases(), count, seed):
        with in_time():
            outcome = case.run(inputs)
        if outcome not in FINE:
            faults.append(f"{case.entry_point}: {case.name}: {outcome}")
    assert not faults, "\n".join([f"NUFILT_SEED={seed}", *faults])
    written = {name.partition("/")[0] for name in contents(inputs)}
    assert written <= {"base", "task1", "task2", "lora", "one", "new", "recipe.yaml"}
