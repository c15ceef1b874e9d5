"""An option is said once: signature, YAML and messages agree with the dataclass."""

import dataclasses
import inspect

import pytest
from fusion_bench.utils import instantiate

from fusion_bench_nufilt import FusionConfig, NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.continual import ProtocolConfig
from fusion_bench_nufilt.continual.protocol import DeviceConfig
from fusion_bench_nufilt.core.adapter import SOLVERS
from fusion_bench_nufilt.core.options import choices
from fusion_bench_nufilt.folders import Settings
from fusion_bench_nufilt.layers import TargetConfig

KINDS = (FusionConfig, TargetConfig, DeviceConfig, ProtocolConfig)


def test_the_algorithm_names_every_option_in_its_signature():
    parameters = inspect.signature(NufiltContinualMergingAlgorithm).parameters
    defaults = {each.name: each.default for kind in KINDS for each in dataclasses.fields(kind)}
    assert {name: parameters[name].default for name in defaults} == defaults


def test_every_option_has_help():
    for kind in KINDS:
        for each in dataclasses.fields(kind):
            assert each.metadata["help"].endswith("."), each.name


def test_every_choice_of_solver_has_its_function():
    (solver,) = (each for each in dataclasses.fields(FusionConfig) if each.name == "solver")
    assert choices(solver) == tuple(SOLVERS)


@pytest.mark.parametrize("kind", [ProtocolConfig, Settings])
@pytest.mark.parametrize("seed", ["7", 7.0, True, None])
def test_a_seed_that_is_no_whole_number_is_refused_by_runs_and_by_folders(kind, seed):
    with pytest.raises(ValueError, match="seed must be a whole number, got"):
        kind(seed=seed)


def test_a_misspelt_keyword_is_refused_with_the_right_one():
    with pytest.raises(ValueError, match=r"no option 'nul_rank'; did you mean 'null_rank'\?"):
        NufiltContinualMergingAlgorithm(nul_rank=3)


@pytest.mark.parametrize("method", ["nufilt", "continual/task_arithmetic"])
def test_a_misspelt_key_in_yaml_is_refused_with_the_right_one(method):
    config = compose_run([f"method={method}", "+method.shufle_order=false"]).method
    with pytest.raises(Exception, match=r"no option 'shufle_order'; did you mean 'shuffle_order'\?"):
        instantiate(config)
