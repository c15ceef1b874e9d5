"""One merging step on a stack of layers."""

import pytest
import torch

from fusion_bench_nufilt.nufilt import FusionConfig
from fusion_bench_nufilt.nufilt.solvers import solver_of
from fusion_bench_nufilt.nufilt.step import difference, fuse_stack


@pytest.mark.parametrize("null_space", [True, False, "zero"])
@pytest.mark.parametrize("is_first_task", [True, False])
def test_a_step_writes_to_nothing_that_it_is_given(null_space, is_first_task):
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 20, 12, generator=generator) for _ in range(3)]
    A = torch.randn(2, 3, 12, generator=generator)
    config = FusionConfig(null_rank=4, lora_rank=3, null_space=null_space, first_task="release")
    before = [value.clone() for value in (*given, A)]
    solve = solver_of(config)
    fuse_stack(*given, A, config, solve, is_first_task=is_first_task, float64=False)
    for value, value_before in zip((*given, A), before, strict=True):
        assert torch.equal(value, value_before)


def test_a_difference_is_that_of_the_whole_matrices_however_many_rows_are_taken_at_a_time():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 700, 300, generator=generator).bfloat16()
    base = torch.randn(2, 300, 700, generator=generator).half().mT
    assert torch.equal(difference(weight, base, torch.float32), weight.float() - base.float())
