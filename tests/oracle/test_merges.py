"""Merges that nobody thought of, by oracles that others wrote."""

import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, reject, seed, settings

from tests.oracle.cases import Case, Lora, NotTrainableError, Task, save_case
from tests.oracle.checks import check_case
from tests.oracle.conftest import BEGIN, drawn
from tests.oracle.draw import cases
from tests.oracle.regressions import REGRESSIONS

SEED = int(os.environ.get("ORACLE_SEED") or 0)
CASES = int(os.environ.get("ORACLE_CASES") or 1000)
MINUTES = float(os.environ.get("ORACLE_MINUTES") or "inf")
#: Cases of a fast test, and of a nightly one, each of which shows one defect at most.
FAST = 4
NIGHTLY = 20


def check_cases(start: int, count: int) -> None:
    """Check so many cases, which this seed draws; what fails is shrunk, and printed as it is made
    again.
    """

    @seed(start)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases())
    def check(case):
        with tempfile.TemporaryDirectory() as name:
            try:
                check_case(case, Path(name))
            except NotTrainableError:
                reject()
            except Exception as error:
                error.add_note(f"{case}\n{case.command()}")
                raise
        drawn(case)

    check()


@pytest.mark.parametrize(("defect", "case"), REGRESSIONS.items(), ids=list(REGRESSIONS))
def test_what_was_wrong_once_is_right(defect, case, tmp_path):
    check_case(case, tmp_path)


@pytest.mark.parametrize("tying", [False, True])
def test_an_adapter_that_peft_does_not_run_is_no_case(tying, tmp_path):
    lora = Lora(saved=("head",), tokens=True, tying=tying)
    with pytest.raises(NotTrainableError):
        save_case(Case("Llama 3", (Task(1, lora),), tied=True), tmp_path)


@pytest.mark.parametrize("number", range(3))
def test_a_few_merges_are_what_formulas_and_laws_say(number):
    check_cases(number, FAST)


@pytest.mark.oracle
@pytest.mark.parametrize("number", range(-(-CASES // NIGHTLY)))
def test_merges_are_what_formulas_and_laws_say(number):
    if time.monotonic() - BEGIN > 60 * MINUTES:
        pytest.skip(f"the {MINUTES:g} minutes are over")
    check_cases(10_000 * (SEED + 1) + number, NIGHTLY)
