"""What is wrong with the input of a run is one line, with the trace for those who ask for it."""

import logging

import pytest
from hydra.errors import CompactHydraException

from fusion_bench_nufilt.continual.program import one_line_errors


def fail(program):
    with one_line_errors(program):
        raise ValueError("model 'task2' lacks layer 'fc1'")


def test_under_fusion_bench_it_is_of_the_kind_that_hydra_prints_in_one_line(caplog):
    with pytest.raises(CompactHydraException, match="model 'task2' lacks layer 'fc1'") as caught:
        fail(program=object())
    assert isinstance(caught.value, ValueError)
    logging.getLogger("fusion_bench.scripts.cli").error(caught.value, exc_info=caught.value)  # as FusionBench does
    assert "task2" in caplog.text
    assert "Traceback" not in caplog.text


def test_elsewhere_it_stays_what_it_is():
    with pytest.raises(ValueError, match="task2") as caught:
        fail(program=None)
    assert type(caught.value) is ValueError


@pytest.mark.slow
def test_the_command_ends_in_one_line(fusion_bench):
    done = fusion_bench("method=nufilt", "modelpool=nufilt_demo", "method.target_modules=[typo]", check=False)
    assert done.returncode == 1
    assert "'typo' of ['typo'] names no layer" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
