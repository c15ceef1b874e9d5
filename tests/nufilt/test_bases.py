"""Bases of leading directions."""

import torch

from fusion_bench_nufilt.nufilt import bases


def test_a_basis_of_a_size_is_drawn_once_for_all_layers(note_calls):
    """On a GPU, the draws of `best` took as long as all else."""
    sizes = note_calls(bases, "random_start")
    bases._start_of_basis.cache_clear()
    layers = torch.randn(3, 20, 12)
    for layer in layers:
        bases.leading_basis(layer, 4, rounds=2)
    first = bases.leading_basis(layers[0], 4, rounds=2)
    assert sizes == [(12, 4)]
    bases._start_of_basis.cache_clear()
    assert torch.equal(first, bases.leading_basis(layers[0], 4, rounds=2))
