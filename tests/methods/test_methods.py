"""A layer-wise method is one class, which a run goes on with and names; its YAML repeats it."""

import dataclasses
import re
from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from fusion_bench.utils import instantiate
from hydra.utils import get_class
from torch.nn import Linear

from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.compare.configs import compose_run, plain
from fusion_bench_nufilt.methods import METHODS, LayerMethod, find_method
from fusion_bench_nufilt.methods.options import DeviceConfig, ProtocolConfig, TargetConfig
from fusion_bench_nufilt.utils.options import option, split_options
from tests.continual.helpers import (
    pool,
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


MISTAKES = {
    "update() must return two values": ("update", lambda after, measures: after),
    "update() was given the state {'sum': (1, 24, 16), 'count': (1,)}, returned {'sum'": (
        "update",
        lambda after, measures: ({"sum": after["sum"]}, measures),
    ),
    "update() must measure one number for each of 1 layers, returned {'task_norm': ()}": (
        "update",
        lambda after, measures: (after, {"task_norm": measures["task_norm"].mean()}),
    ),
    # Its numbers would be written in another order.
    "merged_weight() was given weights (1, 24, 16), returned (1, 16, 24)": (
        "merged_weight",
        lambda weight: weight.transpose(-1, -2),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_a_method_of_ones_own_returns_wrong_is_named(mistake, monkeypatch):
    function, wrong = MISTAKES[mistake]
    right = getattr(RunningSum, function)

    def mistaken(self, *arguments):
        result = right(self, *arguments)
        return wrong(*result) if isinstance(result, tuple) else wrong(result)

    monkeypatch.setitem(METHODS, "running_sum", RunningSum)
    monkeypatch.setattr(RunningSum, function, mistaken)
    base = Linear(16, 24)
    task = deepcopy(base)
    task.weight.data += 0.01
    models = {"_pretrained_": base, "one": task}
    with pytest.raises(ValueError, match=re.escape(f"method 'running_sum': {mistake}")):
        LayerwiseMergingAlgorithm("running_sum").run(models)


def test_what_is_too_large_is_said_with_the_dtype_in_which_it_is_kept(monkeypatch):
    def update(self, state, base, task, step):
        return {**state, "sum": state["sum"] * torch.inf + torch.inf}, {}

    monkeypatch.setitem(METHODS, "running_sum", RunningSum)
    monkeypatch.setattr(RunningSum, "update", update)
    monkeypatch.setattr(
        RunningSum,
        "init_state",
        lambda self, base: {"sum": torch.zeros_like(base, dtype=torch.float32)},
    )
    base = Linear(16, 24).bfloat16()
    models = {"_pretrained_": base, "one": deepcopy(base)}
    with pytest.raises(ValueError, match=r"too large for torch\.float32"):
        LayerwiseMergingAlgorithm("running_sum").run(models)


def test_a_model_that_nobody_sees_is_not_rendered(monkeypatch):
    rendered = []

    def merged_weight(self, state, base):
        rendered.extend(self.names)
        return base

    monkeypatch.setitem(METHODS, "running_sum", RunningSum)
    monkeypatch.setattr(RunningSum, "merged_weight", merged_weight)
    LayerwiseMergingAlgorithm("running_sum").run(pool(tasks=3))
    assert len(rendered) == len(set(rendered)) > 0


def test_the_log_names_the_method_behind_best(caplog):
    with caplog.at_level("INFO"):
        instantiate(compose_run(["method=best"]).method).run(pool(tasks=2))
    assert "TSV-M with spectral voting (ramp 0.4, scale 1.0)" in caplog.text


def test_a_method_in_yaml_and_one_made_in_python_have_the_values_of_its_dataclasses():
    for name, method in METHODS.items():
        own, _ = split_options((method.Options, TargetConfig), method.defaults)
        expected = {}
        for options in (*own, DeviceConfig(), ProtocolConfig()):
            expected |= dataclasses.asdict(options)
        # The file says the options and nothing else.
        written = plain(compose_run([f"method={name}"]).method)
        written.pop("layer_method", None)
        assert issubclass(get_class(written.pop("_target_")), LayerwiseMergingAlgorithm)
        assert written == expected, name
        config = LayerwiseMergingAlgorithm(name).config
        assert {key: config[key] for key in expected} == expected, name


def test_a_method_that_is_not_registered_is_refused_with_those_that_are():
    with pytest.raises(
        ValueError, match=r"no layer-wise method 'product'; there are best, .*, tsv_stream"
    ):
        find_method("product")
