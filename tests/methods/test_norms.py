"""Updates of extreme norms are merged as others are, or refused by name."""

import pytest
import torch

from fusion_bench_nufilt import FusionConfig
from fusion_bench_nufilt.merge.fuse import merge_matrices
from fusion_bench_nufilt.methods import METHODS, ORDER_FREE
from fusion_bench_nufilt.methods.nufilt import Nufilt
from tests.methods.test_spectral import distance, task_vectors

NAMES = ["nufilt", *ORDER_FREE]
every_method = pytest.mark.parametrize("kind", [METHODS[name] for name in NAMES], ids=NAMES)


def merge(kind, norm):
    options = kind.Options()
    if kind is Nufilt:
        options = FusionConfig(null_rank=4, lora_rank=0)
    taus = [norm * tau / tau.norm() for tau in task_vectors((24, 16), count=3)]
    base = {"layer": torch.zeros(24, 16)}
    tasks = [{"layer": tau.float()} for tau in taus]
    return merge_matrices(kind(options, ["layer"]), base, tasks)["layer"]


@every_method
@pytest.mark.parametrize("norm", [2e-12, 5e11])
def test_the_norm_of_the_updates_does_not_matter(kind, norm):
    assert distance(merge(kind, norm) / norm, merge(kind, 1.0)) < 1e-4


@every_method
@pytest.mark.parametrize("norm", [1e-18, 1e-13, 1e13, 1e18])
def test_an_update_whose_powers_float32_cannot_hold_is_refused_by_name(kind, norm):
    with pytest.raises(ValueError, match=r"layer 'layer' \(24, 16\): its update has the norm 1e"):
        merge(kind, norm)
