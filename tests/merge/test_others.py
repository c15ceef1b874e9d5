"""A mean counts the models that have the tensor, whatever the order, and the manifest keeps the
count.
"""

import json

import pytest
import torch

from tests.merge.helpers import change, manifest, merge, tensors

EMBEDDING = "model.embed_tokens.weight"
OPTIONS = {"other_params": "mean", "on_shape_mismatch": "keep-base"}


@pytest.fixture
def stream(stream):
    """A stream whose second task has a larger vocabulary than the base."""
    change(stream / "task2", EMBEDDING, lambda value: torch.cat([value, value[:4]]))
    return stream


def embedding(folder):
    return tensors(folder)[EMBEDDING]


@pytest.mark.parametrize("order", [("task1", "task2"), ("task2", "task1")])
@pytest.mark.parametrize("at_once", [True, False])
def test_an_ignored_embedding_does_not_count_in_the_mean(stream, order, at_once):
    if at_once:
        out = merge(stream, order, **OPTIONS)
    else:
        merge(stream, order[:1], "first", **OPTIONS)
        out = merge(stream, order[1:], merged="first", **OPTIONS)
    assert torch.equal(embedding(out), embedding(stream / "task1"))
    assert manifest(out)["mean_counts"] == {EMBEDDING: 1}
    last = merge(stream, ["task3"], "last", merged="out", **OPTIONS)
    expected = torch.lerp(embedding(stream / "task1"), embedding(stream / "task3"), 0.5)
    assert torch.equal(embedding(last), expected)
    assert manifest(last)["mean_counts"] == {EMBEDDING: 2}


def test_until_a_model_has_the_tensor_the_mean_is_the_bases(stream):
    out = merge(stream, ["task2"], **OPTIONS)
    assert torch.equal(embedding(out), embedding(stream / "base"))
    assert manifest(out)["mean_counts"] == {EMBEDDING: 0}


def test_a_manifest_without_counts_counts_every_step(stream):
    out = merge(stream, ["task1", "task2"], **OPTIONS)
    content = manifest(out)
    del content["mean_counts"]
    (out / "nufilt.json").write_text(json.dumps(content))
    last = merge(stream, ["task3"], "last", merged="out", settings={"verify": False}, **OPTIONS)
    expected = torch.lerp(embedding(stream / "task1"), embedding(stream / "task3"), 1 / 3)
    assert torch.equal(embedding(last), expected)
    assert manifest(last)["mean_counts"] == {}
