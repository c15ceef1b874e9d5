"""Every field of every file that is read and every option, spoilt: one line that names it, or
nothing is wrong.
"""

import os
import shutil
from datetime import date

import pytest

from tests.adversary.cases import cases, good_folder
from tests.adversary.entry_points import FINE, Case, sample, spoilt

FAST, NIGHTLY = 50, 2000  # cases


@pytest.fixture(scope="module")
def inputs(good, tmp_path_factory):
    return good_folder(shutil.copytree(good, tmp_path_factory.mktemp("entry_points") / "good"))


@pytest.fixture
def checks_only(monkeypatch, inputs):
    """Nothing behind an entry point is done: no run and no picture."""

    def enough(*_, **__):
        raise ValueError("enough: it would run")

    monkeypatch.setattr("fusion_bench_nufilt.compare.run.compose_run", enough)
    monkeypatch.setattr("fusion_bench_nufilt.compare.configs.compose_run", enough)
    monkeypatch.setattr("fusion_bench_nufilt.pages.write.save_picture", lambda *_: None)
    monkeypatch.setattr(
        "altair.utils.schemapi.DEBUG_MODE", False
    )  # which would check each part of a chart twice
    monkeypatch.chdir(inputs)


def check(some: list[Case], folder, about: str) -> None:
    faults = []
    for case in some:
        outcome = spoilt(case, folder)
        if outcome not in FINE:
            faults.append(f"{case.entry_point}: {case.name}: {outcome}")
    assert not faults, "\n".join([about, *faults])


@pytest.mark.slow
def test_a_sample_of_bad_input_is_refused_by_name_or_does_nothing(checks_only, inputs):
    every = [case for case in cases(inputs) if case.quick]
    check(sample(every, FAST, seed=0), inputs, f"{FAST} of {len(every)} cases")


@pytest.mark.nightly
def test_bad_input_is_refused_by_name_or_does_nothing(checks_only, inputs):
    every = cases(inputs)
    seed = int(os.environ.get("NUFILT_SEED", date.today().toordinal()))  # others every night
    check(sample(every, NIGHTLY, seed), inputs, f"of {len(every)} cases, NUFILT_SEED={seed}")
