"""The settings refuse what makes no sense, naming the key; an option is said once."""

import dataclasses
import inspect

import pytest
from fusion_bench.utils import instantiate

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.methods.options import DeviceConfig, ProtocolConfig, Settings, TargetConfig
from fusion_bench_nufilt.nufilt import FusionConfig

KINDS = (FusionConfig, TargetConfig, DeviceConfig, ProtocolConfig)


def test_ranks_and_steps_are_whole_numbers_from_zero():
    for key in ("null_rank", "lora_rank", "task_rank", "max_steps"):
        otherwise = "" if key == "max_steps" else ", or a share"
        for value in (-1, -0.1, 1.0, 1.5, True, "8", None, float("nan")):
            with pytest.raises(ValueError, match=f"{key} must be a whole number >= 0{otherwise}"):
                FusionConfig(**{key: value})


def test_a_value_out_of_range_is_refused_by_name():
    for key, values in {
        "lr": [0, -1e-3, float("nan"), "fast"],
        "init_std": [-0.1, float("inf")],
        "null_space": ["off", 1],
        "first_task": ["authors"],
        "solver": ["sgd"],
        "ridge": [0],
    }.items():
        for value in values:
            with pytest.raises(ValueError, match=key):
                FusionConfig(**{key: value})
    for key, value in {
        "evaluate": "sometimes",
        "shuffle_order": 1,
        "save_on_every_step": 1,
    }.items():
        with pytest.raises(ValueError, match=key):
            ProtocolConfig(**{key: value})
    for kind in (ProtocolConfig, Settings):
        for seed in ("7", 7.0, True, None):
            with pytest.raises(ValueError, match="seed must be a whole number, got"):
                kind(seed=seed)


def test_the_defaults_are_the_papers():
    config = FusionConfig()
    assert (config.null_rank, config.lora_rank, config.task_rank) == (128, 64, 8)
    assert (config.lr, config.max_steps, config.init_std) == (1e-3, 50, 0.02)
    assert (config.null_space, config.first_task, config.solver) == (True, "paper", "adam")


# --- ranks as shares of a layer's input width ---


def test_a_share_is_rounded_and_at_least_one_and_a_whole_rank_is_the_same_in_every_layer():
    for rank, d_i, number in (
        (1 / 3, 128, 43),
        (0.5, 128, 64),
        (1 / 6, 768, 128),
        (0.001, 64, 1),
        (128, 64, 128),
        (128, 4096, 128),
        (0, 64, 0),
    ):
        config = FusionConfig(null_rank=rank, lora_rank=rank, task_rank=rank)
        assert config.ranks(d_i) == (number, number, number)


# --- where options are read ---


def test_every_option_has_help_and_is_in_the_signature_of_the_algorithm():
    parameters = inspect.signature(NufiltContinualMergingAlgorithm).parameters
    for kind in KINDS:
        for option in dataclasses.fields(kind):
            assert parameters[option.name].default == option.default, option.name
            assert option.metadata["help"].endswith("."), option.name


def test_a_misspelt_option_is_refused_with_the_right_one_in_python_and_in_yaml():
    with pytest.raises(ValueError, match=r"no option 'nul_rank'; did you mean 'null_rank'\?"):
        NufiltContinualMergingAlgorithm(nul_rank=3)
    for method in ("nufilt", "continual/task_arithmetic"):
        config = compose_run([f"method={method}", "+method.shufle_order=false"]).method
        did_you_mean = r"no option 'shufle_order'; did you mean 'shuffle_order'\?"
        with pytest.raises(Exception, match=did_you_mean):
            instantiate(config)
