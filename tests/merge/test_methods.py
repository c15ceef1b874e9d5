"""A method that somebody else registers merges folders: its state, a resumed run, going on, the
manifest.
"""

import pytest
import torch
from safetensors.torch import load_file

from fusion_bench_nufilt.methods import METHODS
from fusion_bench_nufilt.utils.manifest import read_manifest
from tests.merge.helpers import STATE, hashes, interrupt, merge, same, tensors
from tests.methods.test_methods import RunningSum

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(METHODS, "running_sum", RunningSum)


def test_its_weights_are_rendered_once_from_the_state_of_all_tasks_and_manifest_and_card_name_it(
    stream, note_calls
):
    rendered = note_calls(RunningSum, "merged_weight", lambda method, *_: tuple(method.names))
    out = merge(stream, method="running_sum", scale=0.3)
    assert len(rendered) == len(set(rendered)) == 14
    key = f"{UP}.weight"
    base = tensors(stream / "base")[key]
    tasks = [tensors(stream / name)[key] for name in ("task1", "task2", "task3")]
    expected = base + 0.3 * sum(task - base for task in tasks)
    torch.testing.assert_close(tensors(out)[f"{UP}.weight"], expected, rtol=0, atol=1e-6)
    assert load_file(out / STATE)[f"{UP}.state.count"] == 3
    manifest = read_manifest(out)
    assert manifest["method"] == "running sum"
    assert manifest["settings"]["method"] == "running_sum"
    assert manifest["settings"]["scale"] == 0.3
    assert STATE in manifest["files"]
    assert "task arithmetic" in (out / "README.md").read_text()


def test_one_by_one_or_interrupted_it_is_the_same(stream):
    whole = merge(stream, method="running_sum")
    merge(stream, ["task1", "task2"], "two", method="running_sum")
    last = merge(stream, ["task3"], "last", merged="two", method="running_sum")
    assert same(tensors(last), tensors(whole))
    assert same(load_file(last / STATE), load_file(whole / STATE))
    interrupt(stream, out="resumed", method="running_sum")
    assert hashes(merge(stream, out="resumed", method="running_sum")) == hashes(whole)


def test_a_weight_that_is_no_number_is_not_called_too_large(stream, monkeypatch):
    monkeypatch.setattr(RunningSum, "merged_weight", lambda self, state, base: base * torch.nan)
    with pytest.raises(ValueError, match=r"_proj\.weight' was merged to NaN$"):
        merge(stream, method="running_sum")
