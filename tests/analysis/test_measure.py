"""What is measured of whole methods."""

import pytest

from fusion_bench_nufilt.analysis.measure import _ranks, default_methods


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({"null_rank": 10, "task_rank": 4}, (10, 4)),
        ({"null_rank": 0.5, "task_rank": 0.25}, (32, 16)),
        ({"null_rank": "all", "task_rank": True}, (128, 8)),
        ({}, (128, 8)),
    ],
)
def test_the_data_free_losses_have_the_methods_own_ranks_whole_or_shares(settings, ranks):
    found = _ranks(settings).ranks(64)
    assert (found.null, found.task) == ranks


def test_the_default_methods_have_the_papers_ranks_in_proportion_rounded_down():
    assert "null_rank=128:lora_rank=64," in default_methods(768)
    assert default_methods(4096) == default_methods(768)
    assert "null_rank=10:lora_rank=5," in default_methods(64)  # 10.7 and 5.3
