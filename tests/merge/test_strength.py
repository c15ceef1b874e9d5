"""A merge whose method finds the strength of all of it."""

import logging

import pytest
import torch

from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.merge import merge_folders, strength
from fusion_bench_nufilt.merge.beside import UPDATES
from fusion_bench_nufilt.merge.output import work_folder
from fusion_bench_nufilt.pages.write import write_results
from tests.merge.helpers import STATE, hashes, manifest, merge, plan, same, save_stream, tensors
from tests.models import llama

AUTO = {"method": "best", "scale": "auto"}


def largest_difference(state, other):
    return max((value.double() - other[key].double()).abs().max().item() for key, value in state.items())


def test_the_result_is_that_of_the_number_which_was_found(stream, caplog):
    with caplog.at_level(logging.INFO):
        found = manifest(auto := merge(stream, out="auto", **AUTO))["strength"]
    assert f"strength {found['scale']:.3g} (at 1, tasks keep" in caplog.text
    assert found["scale"] != pytest.approx(1, abs=0.05)
    fixed = merge(stream, out="fixed", method="best", scale=found["scale"])
    assert largest_difference(tensors(auto), tensors(fixed)) < 1e-6
    assert sorted(hashes(auto)) == sorted(hashes(fixed))  # no updates are left behind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_pool_has_the_bits_and_the_strength_of_its_folders(tmp_path, dtype):
    models = save_stream(tmp_path, llama(), dtype=dtype)
    folder = merge(tmp_path, **AUTO)
    algorithm = LayerwiseMergingAlgorithm("best", scale="auto", ramp=0.4, shuffle_order=False)
    merged = algorithm.run(models).state_dict()
    layers = {key: value for key, value in tensors(folder).items() if key.endswith("_proj.weight")}
    assert same(layers, {key: merged[key] for key in layers})
    assert algorithm.strength == manifest(folder)["strength"]


def test_one_task_after_another_is_all_at_once(stream):
    merge(stream, ["task1"], "one", **AUTO)
    merge(stream, ["task2"], "two", merged="one", **AUTO)
    three = merge(stream, ["task3"], "three", merged="two", **AUTO)
    whole = merge(stream, **AUTO)
    assert same(tensors(three), tensors(whole))
    assert manifest(three)["strength"] == manifest(whole)["strength"]


def test_a_run_that_was_stopped_while_it_wrote_the_weights_goes_on(stream, monkeypatch):
    expected = hashes(merge(stream, out="expected", **AUTO))
    weigh, written = strength.merged_weight, []

    def stop(plan, layer, *rest):
        if len(written) == 5:
            raise InterruptedError
        written.append(layer.name)
        return weigh(plan, layer, *rest)

    monkeypatch.setattr(strength, "merged_weight", stop)
    with pytest.raises(InterruptedError):
        merge(stream, **AUTO)
    assert (work_folder(stream / "out") / "model" / UPDATES).is_file()
    monkeypatch.setattr(strength, "merged_weight", lambda *all: written.append(all[1].name) or weigh(*all))
    assert hashes(merge_folders(plan(stream, **AUTO), stream / "out")) == expected
    assert sorted(written) == sorted(set(written))


def test_a_stream_may_go_on_at_a_strength_of_ones_own(stream):
    merge(stream, ["task1", "task2"], "two", **AUTO)
    on = merge(stream, ["task3"], "on", merged="two", method="best", scale=0.8)
    assert same(tensors(on), tensors(merge(stream, method="best", scale=0.8)))


def test_a_state_that_lacks_what_the_strength_is_found_from_is_refused_with_the_remedy(stream):
    merge(stream, ["task1", "task2"], "two", method="best")
    with pytest.raises(ValueError, match=r"has no '.*energy' in .*: give scale a number, such as 1"):
        plan(stream, ["task3"], merged="two", **AUTO)


def test_without_a_state_the_model_is_the_same(stream):
    last = merge(stream, out="last", settings={"state": False}, **AUTO)
    assert same(tensors(last), tensors(merge(stream, **AUTO)))
    assert not (last / STATE).exists()


def test_the_page_and_the_card_tell_the_strength(stream):
    found = manifest(auto := merge(stream, **AUTO))["strength"]
    assert f"Strength: {found['scale']:.3g}" in (auto / "README.md").read_text()
    write_results(auto)
    assert f"Strength of the merged update: {found['scale']:.3g}," in (auto / "index.html").read_text()
