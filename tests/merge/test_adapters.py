"""Adapters are merged in a basis of their factors, whatever becomes of them."""

import pytest
import torch

from fusion_bench_nufilt.methods import METHODS
from tests.merge.helpers import merge, save_stream, tensors
from tests.models.test_adapters import random_adapter
from tests.tiny_models import llama

BOTH = ("math", "code")


def save_adapters(folder, dtype=torch.float64, tasks=3, **config):
    """A base, adapters of it, and what peft makes of each."""
    save_stream(folder, llama(tie_word_embeddings=False), tasks=0, dtype=dtype)
    for number, name in enumerate(("math", "code", "chat")[:tasks]):
        base = type(llama()).from_pretrained(folder / "base", dtype=dtype)
        options = {"r": 2 + number, "target_modules": "all-linear", **config}
        random_adapter(folder / name, folder / f"{name}_whole", base, number, **options)


@pytest.mark.parametrize("method", ["nufilt", "best", "wudi_sums"])
def test_adapters_are_merged_as_the_models_that_peft_makes_of_them(tmp_path, method):
    """As factors, unrounded, they have no directions but their own."""
    save_adapters(tmp_path, tasks=2)
    options = {"method": method, "target_modules": "all-linear"}
    result = tensors(merge(tmp_path, BOTH, "out", **options))
    expected = tensors(merge(tmp_path, ["math_whole", "code_whole"], "expected", **options))
    base = tensors(tmp_path / "base")
    for key, value in expected.items():
        change = (value - base[key]).norm()
        assert (result[key] - value).norm() <= 1e-6 * change, key


def test_a_method_is_given_no_more_than_the_directions_of_the_adapters(tmp_path, monkeypatch):
    save_adapters(tmp_path, tasks=2)
    kind = METHODS["nufilt"]
    update = kind.update
    shapes = set()

    def noted(self, names, state, base, *args, **options):
        shapes.add(tuple(base.shape[1:]))
        return update(self, names, state, base, *args, **options)

    monkeypatch.setattr(kind, "update", noted)
    merge(tmp_path, BOTH, target_modules="all-linear")
    assert shapes == {(5, 32), (5, 64)}
