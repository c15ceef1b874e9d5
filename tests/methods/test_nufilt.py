"""What NUFILT says of its own options."""

import pytest

from fusion_bench_nufilt import FusionConfig, NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.merge import plan_merge
from fusion_bench_nufilt.stream import layerwise
from tests.merge.helpers import save_stream
from tests.models import llama


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({}, True),
        ({"null_rank": 16}, False),
        ({"null_rank": 0.17}, False),
        ({"null_space": False}, False),
    ],
)
def test_nufilt_says_once_that_its_filter_covers_the_layers_and_what_to_give(
    options, warns, caplog, tmp_path
):
    layerwise._warn_once.cache_clear()
    models = save_stream(tmp_path, llama(), tasks=2)
    for _ in range(2):
        NufiltContinualMergingAlgorithm(max_steps=1, **options).run(models)
    said = [record.getMessage() for record in caplog.records if "null_rank" in record.getMessage()]
    layers = "covers more than half of the inputs of 14 of 14 layers"
    assert [
        f"null_rank=128 {layers}" in text and "null_rank=0.1667 lora_rank=0.0833" in text
        for text in said
    ] == [True] * warns
    base, *tasks = (str(tmp_path / name) for name in ("base", "task1", "task2"))
    planned = plan_merge(base, tasks, options=FusionConfig(**options))
    assert [text for text in planned.warnings if "null_rank" in text] == said
