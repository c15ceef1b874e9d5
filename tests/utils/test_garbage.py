"""Python's search for garbage."""

import gc

import pytest

from fusion_bench_nufilt.utils.garbage import garbage_left


@pytest.fixture
def collector():
    """The test may turn the collector on and off."""
    was_enabled = gc.isenabled()
    yield
    if was_enabled:
        gc.enable()
    else:
        gc.disable()


def import_that_fails():
    with garbage_left():
        assert not gc.isenabled()
        raise ImportError


@pytest.mark.parametrize("turn", [gc.enable, gc.disable])
def test_no_garbage_is_searched_for_during_imports_and_then_as_before(collector, turn):
    turn()
    before = gc.isenabled()
    with pytest.raises(ImportError):
        import_that_fails()
    assert gc.isenabled() == before
