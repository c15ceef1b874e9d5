"""Second moments are those of the inputs that the layers really get."""

import json
from types import SimpleNamespace

import pytest
import torch

from fusion_bench_nufilt.analysis.pool import merged_layers
from fusion_bench_nufilt.analysis.record import (
    known_moments,
    memory_of,
    record_moments,
    shared_inputs,
    task_inputs,
)
from tests.analysis.helpers import pictures, pool_of, second_moment, sentences
from tests.tiny_models import TOWER, clip, t5


def record(model, loader, folder, max_memory=10**9, about=None):
    modules = [view.module for view in merged_layers(model, "auto").values()]
    owner = shared_inputs(model, modules, loader)
    return owner, record_moments(model, loader, owner, folder, about or {"task": "a"}, max_memory)


def inputs_of(model, module, batches):
    """The rows that a layer gets, without padding, by a hook of the plainest kind."""
    seen = []
    rows = []
    handle = model.get_submodule(module).register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    for batch in batches:
        with torch.no_grad():
            if isinstance(batch, dict):
                model(**batch)
                X = seen.pop()[batch["attention_mask"].bool()]
            else:
                model(batch[0])
                X = seen.pop().flatten(0, -2)
        rows.append(X)
    handle.remove()
    return torch.cat(rows)


def test_the_moments_are_those_of_all_tokens_and_query_key_and_value_share_one(tmp_path):
    model = clip()
    loader = pictures(10)
    owner, moments = record(model, loader, tmp_path)
    for layer in merged_layers(model, "auto").values():
        X = inputs_of(model, layer.module, loader)
        assert torch.allclose(moments.read(layer.module), second_moment(X), atol=1e-5)
        assert moments.tokens == len(X) == 10 * 5
    attention = f"{TOWER}encoder.layers.1.self_attn"
    assert len({owner[f"{attention}.{part}"] for part in ("q_proj", "k_proj", "v_proj")}) == 1
    assert len(set(owner.values())) == 2 * 3


def test_padding_is_left_out(tmp_path):
    model = t5()
    loader = sentences([9, 4, 7, 2])
    model.config.decoder_start_token_id = 0
    layers = list(merged_layers(model, "auto").values())
    assert all(layer.name.startswith("encoder.") for layer in layers)
    _, moments = record(model, loader, tmp_path)
    assert moments.tokens == 9 + 4 + 7 + 2
    X = inputs_of(model, layers[0].module, loader)
    assert torch.allclose(moments.read(layers[0].module), second_moment(X), atol=1e-5)


def test_a_memory_bound_costs_passes_and_changes_nothing(tmp_path):
    model = clip()
    loader = pictures(6)
    owner, whole = record(model, loader, tmp_path / "whole")
    third = memory_of(model, owner.values()) // 3
    _, parts = record(model, loader, tmp_path / "parts", max_memory=third)
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) == 3
    for name in owner:
        assert torch.equal(whole.read(name), parts.read(name))


def test_moments_are_known_again_only_for_the_same(tmp_path):
    record(clip(), pictures(3), tmp_path, about={"samples": 3})
    assert known_moments(tmp_path, {"samples": 3}) is not None
    assert known_moments(tmp_path, {"samples": 4}) is None
    assert known_moments(tmp_path / "elsewhere", {"samples": 3}) is None


def damage(file, content):
    if content is None:
        file.unlink()
    elif isinstance(content, dict):
        file.write_text(json.dumps({**json.loads(file.read_text()), **content}))
    else:
        file.write_text(content)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("about.json", "[1", "it is no JSON"),
        ("about.json", {"owner": {"a": "b"}}, "the moment of 'b'"),
        ("about.json", {"files": {}}, "about.json does not list its files"),
        ("moments-0.safetensors", None, "lacks moments-0.safetensors"),
        ("moments-0.safetensors", "x", "moments-0.safetensors is not what was saved"),
    ],
)
def test_damaged_moments_are_recorded_again_with_one_warning(
    tmp_path, caplog, file, content, message
):
    record(clip(), pictures(3), tmp_path, about={"samples": 3})
    damage(tmp_path / file, content)
    assert known_moments(tmp_path, {"samples": 3}) is None
    (line,) = caplog.messages
    assert message in line
    assert str(tmp_path) in line
    assert line.endswith("recording again")


def test_samples_are_drawn_once_for_a_seed():
    pool = pool_of({"a": pictures(20)})
    drawn = []
    for seed in (0, 0, 1):
        inputs = task_inputs(pool, "a", 5, seed)
        assert len(inputs.dataset) == 5
        drawn.append(torch.cat([batch[0] for batch in inputs]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert len(task_inputs(pool, "a", 100, 0).dataset) == 20


def test_a_task_pool_that_lacks_inputs_is_named():
    with pytest.raises(ValueError, match="has no data of task 'b', only of a"):
        task_inputs(pool_of({"a": pictures(2)}), "b", 5, 0)
    with pytest.raises(ValueError, match="SimpleNamespace has no test data of a single task"):
        task_inputs(SimpleNamespace(evaluate=None), "b", 5, 0)


def test_a_layer_that_gets_nothing_is_named():
    model = clip()
    model.unused = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"1 layers get no input.*'unused'"):
        shared_inputs(model, ["unused"], pictures(1))
