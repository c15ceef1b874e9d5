"""Python's search for garbage."""

import gc

import pytest
import transformers

from fusion_bench_nufilt.models.architecture import Architecture
from fusion_bench_nufilt.models.checkpoint import Checkpoint
from fusion_bench_nufilt.utils.garbage import garbage_left
from tests.tiny_models import llama


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


def test_no_garbage_is_searched_for_while_a_configuration_imports_its_class(
    collector, tmp_path, note_calls
):
    llama().save_pretrained(tmp_path)
    gc.enable()
    searching = note_calls(
        transformers.AutoConfig, "from_pretrained", lambda *_, **__: gc.isenabled()
    )
    Architecture.of_checkpoint(Checkpoint.open(str(tmp_path)))
    assert searching == [False]
