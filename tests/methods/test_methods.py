"""A layer-wise method is one class: `fusion_bench` runs it with state, resume and manifest; its
YAML repeats it.
"""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from fusion_bench.utils import instantiate
from hydra.utils import get_class

from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.compare.configs import compose_run, plain
from fusion_bench_nufilt.methods import METHODS, LayerMethod, find_method
from fusion_bench_nufilt.methods.options import DeviceConfig, ProtocolConfig, TargetConfig
from fusion_bench_nufilt.models import select_layers
from fusion_bench_nufilt.utils.manifest import read_manifest
from fusion_bench_nufilt.utils.options import option, split_options
from tests.continual.helpers import (
    InterruptedRunError,
    interrupt_after,
    logging_to,
    pool,
    saved_pool,
)


@dataclass(frozen=True)
class SumConfig:
    scale: float = option(0.5, "Strength of the sum of the task vectors.")


class RunningSum(LayerMethod):
    """Task arithmetic: the sum of the task vectors, scaled once."""

    name = "running_sum"
    label = "running sum"
    citation = "task arithmetic ([Ilharco et al., ICLR 2023](https://arxiv.org/abs/2212.04089))"
    Options = SumConfig
    defaults = {"target_modules": "all-linear"}  # noqa: RUF012

    def init_state(self, base):
        return {"sum": torch.zeros_like(base), "count": torch.zeros(len(base))}

    def update(self, state, base, task, step):
        after = {"sum": state["sum"] + task.matrix, "count": state["count"] + 1}
        return after, {"task_norm": torch.linalg.vector_norm(task.matrix, dim=(-2, -1))}

    def merged_weight(self, state, base):
        return base + self.options.scale * state["sum"]


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(METHODS, "running_sum", RunningSum)


def algorithm_in(folder, **options):
    return logging_to(folder, LayerwiseMergingAlgorithm("running_sum", **options))


@pytest.mark.slow
def test_fusion_bench_runs_it_on_the_demo_and_resumes_it(registered, demo, tmp_path):
    pool = instantiate(compose_run(["modelpool=nufilt_demo"]).modelpool, _recursive_=False)
    merged = algorithm_in(tmp_path / "whole", scale=0.3).run(pool)
    with pytest.raises(InterruptedRunError):
        algorithm_in(tmp_path / "parts", scale=0.3).run(pool, on_step=interrupt_after(2))
    resumed = algorithm_in(tmp_path / "parts", scale=0.3).run(pool)

    base = pool.load_pretrained_model()
    models = [pool.load_model(name) for name in pool.model_names]
    for view in select_layers(base, "all-linear").values():
        theta_0 = view.read(base)
        expected = theta_0 + 0.3 * sum(view.read(model) - theta_0 for model in models)
        torch.testing.assert_close(view.read(merged), expected, rtol=0, atol=1e-6)
        assert torch.equal(view.read(merged), view.read(resumed))
    last = tmp_path / "whole" / "checkpoints" / f"merged_model_{len(models) - 1}"
    manifest = read_manifest(last)
    assert (manifest["method"], manifest["step"]) == ("running sum", len(models))
    assert manifest["settings"]["scale"] == 0.3
    assert "nufilt_state/model.safetensors" in manifest["files"]


def test_a_model_that_nobody_sees_is_not_rendered(registered, monkeypatch):
    rendered = []

    def merged_weight(self, state, base):
        rendered.extend(self.names)
        return base

    monkeypatch.setattr(RunningSum, "merged_weight", merged_weight)
    LayerwiseMergingAlgorithm("running_sum").run(pool(tasks=3))
    assert len(rendered) == len(set(rendered)) > 0


def test_another_strength_from_the_middle_on_is_that_strength_for_all_tasks(tmp_path):
    kind = METHODS["best"]  # tests/merge has every method
    numbers = [each for each in dataclasses.fields(kind.Options) if isinstance(each.default, float)]
    of_new_tasks = ("keep", "faintest")  # what is kept of each, which is no strength
    other = {
        each.name: each.default * 1.1 + 0.1 for each in numbers if each.name not in of_new_tasks
    }
    models = pool(tasks=3)

    def merged(names, **options):
        stream = {name: models[name] for name in ("_pretrained_", *names)}
        if "task1" not in names:
            stream = saved_pool(
                tmp_path, stream, _merged_=tmp_path / "two" / "checkpoints" / "merged_model_1"
            )
        algorithm = LayerwiseMergingAlgorithm(kind.name, shuffle_order=False, **options)
        return logging_to(tmp_path / ("on", "two", "whole")[len(names) - 1], algorithm).run(stream)

    merged(["task1", "task2"])
    on = merged(["task3"], **other).state_dict()
    whole = merged(["task1", "task2", "task3"], **other).state_dict()
    assert all(torch.equal(value, whole[key]) for key, value in on.items())


def test_the_log_names_the_method_behind_best(caplog):
    with caplog.at_level("INFO"):
        instantiate(compose_run(["method=best"]).method).run(pool(tasks=2))
    assert "TSV-M with spectral voting (ramp 0.4, scale 1.0)" in caplog.text


# --- the registry ---


def written(name):
    """What the YAML file of a method says: its options and nothing else."""
    return plain(compose_run([f"method={name}"]).method)


@pytest.mark.parametrize("name", METHODS)
def test_the_yaml_of_a_method_has_the_keys_and_values_of_its_dataclasses(name):
    method = METHODS[name]
    own, _ = split_options((method.Options, TargetConfig), method.defaults)
    expected = {}
    for options in (*own, DeviceConfig(), ProtocolConfig()):
        expected |= dataclasses.asdict(options)
    found = {key: value for key, value in written(name).items() if key != "layer_method"}
    assert issubclass(get_class(found.pop("_target_")), LayerwiseMergingAlgorithm)
    assert found == expected


@pytest.mark.parametrize("name", METHODS)
def test_an_algorithm_made_in_python_has_the_options_of_the_yaml(name):
    config = LayerwiseMergingAlgorithm(name).config
    expected = written(name)
    for key in expected.keys() - {"_target_", "layer_method"}:
        assert config[key] == expected[key], key


def test_a_method_that_is_not_registered_is_refused_with_those_that_are():
    with pytest.raises(
        ValueError, match=r"no layer-wise method 'product'; there are best, .*, tsv_stream"
    ):
        find_method("product")
