"""The defaults of a method are said once, and its YAML file repeats them."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from hydra.utils import get_class

from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.continual import ProtocolConfig
from fusion_bench_nufilt.continual.protocol import DeviceConfig
from fusion_bench_nufilt.layers import TargetConfig
from fusion_bench_nufilt.methods import METHODS, find_method

CONFIG = Path(__file__).parents[2] / "config" / "method"
FILES = {"nufilt": CONFIG / "nufilt.yaml"}


def written(name):
    """Read the YAML file of a method, which says its options and nothing else."""
    return yaml.load(FILES.get(name, CONFIG / "continual" / f"{name}.yaml").read_text(), yaml.CSafeLoader)


@pytest.mark.parametrize("name", METHODS)
def test_the_yaml_of_a_method_has_the_keys_and_values_of_its_dataclasses(name):
    method = METHODS[name]
    options = (method.Options(), TargetConfig(**method.targets), DeviceConfig(), ProtocolConfig())
    expected = {key: value for each in options for key, value in dataclasses.asdict(each).items()}
    found = {key: value for key, value in written(name).items() if key != "layer_method"}
    assert issubclass(get_class(found.pop("_target_")), LayerwiseMergingAlgorithm)
    found |= {key: float(value) for key, value in found.items() if key == "lr"}  # YAML reads 1e-3 as a text
    assert found == expected


@pytest.mark.parametrize("name", METHODS)
def test_an_algorithm_made_in_python_has_the_options_of_the_yaml(name):
    config = LayerwiseMergingAlgorithm(name).config
    for key in written(name).keys() - {"_target_", "lr"}:
        assert config[key] == written(name)[key], key


def test_a_method_that_is_not_registered_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match="one of nufilt, spectral, got 'sum'"):
        find_method("sum")
