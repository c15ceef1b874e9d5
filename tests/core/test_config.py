"""The settings refuse what makes no sense, naming the key."""

import dataclasses

import pytest

from fusion_bench_nufilt.core import FusionConfig


@pytest.mark.parametrize("key", ["null_rank", "lora_rank", "task_rank", "max_steps"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "8", None])
def test_ranks_and_steps_are_whole_numbers_from_zero(key, value):
    with pytest.raises(ValueError, match=f"{key} must be a whole number >= 0"):
        FusionConfig(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", 0),
        ("lr", -1e-3),
        ("lr", float("nan")),
        ("lr", "fast"),
        ("init_std", -0.1),
        ("init_std", float("inf")),
        ("null_space", "off"),
        ("null_space", 1),
        ("first_task", "authors"),
        ("solver", "sgd"),
        ("ridge", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=key):
        FusionConfig(**{key: value})


def test_the_defaults_are_the_papers():
    config = FusionConfig()
    assert (config.null_rank, config.lora_rank, config.task_rank) == (128, 64, 8)
    assert (config.lr, config.max_steps, config.init_std) == (1e-3, 50, 0.02)
    assert (config.null_space, config.first_task, config.solver) == (True, "paper", "adam")


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FusionConfig().lr = 1
