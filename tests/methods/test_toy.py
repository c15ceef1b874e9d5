"""A new layer-wise method is one class: `fusion_bench` and `nufilt merge` run it, with state, resume and manifest."""

from dataclasses import dataclass

import pytest
import torch
from fusion_bench.utils import instantiate

from fusion_bench_nufilt import LayerwiseMergingAlgorithm
from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.core.options import option
from fusion_bench_nufilt.layers import select_layers
from fusion_bench_nufilt.methods import METHODS, LayerMethod
from fusion_bench_nufilt.storage.manifest import read_manifest
from tests.continual.helpers import InterruptedRunError, interrupt_after, logging_to


@dataclass(frozen=True)
class SumConfig:
    scale: float = option(0.5, "Strength of the sum of the task vectors.")


class RunningSum(LayerMethod):
    """Task arithmetic: the sum of the task vectors, scaled once."""

    name = "running_sum"
    label = "running sum"
    citation = "task arithmetic ([Ilharco et al., ICLR 2023](https://arxiv.org/abs/2212.04089))"
    Options = SumConfig
    targets = {"target_modules": "all-linear"}  # noqa: RUF012

    def start(self, layer, theta_0):
        return {"sum": torch.zeros_like(theta_0), "count": torch.tensor(0)}

    def add(self, layer, state, theta_0, tau):
        return {"sum": state["sum"] + tau, "count": state["count"] + 1}

    def weight(self, layer, state, theta_0):
        return theta_0 + self.options.scale * state["sum"]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(METHODS, "running_sum", RunningSum)


def algorithm_in(folder, **options):
    return logging_to(folder, LayerwiseMergingAlgorithm("running_sum", **options))


def test_fusion_bench_runs_it_on_the_demo_and_resumes_it(demo, tmp_path):
    pool = instantiate(compose_run(["modelpool=nufilt_demo"]).modelpool, _recursive_=False)
    merged = algorithm_in(tmp_path / "whole", scale=0.3).run(pool)
    with pytest.raises(InterruptedRunError):
        algorithm_in(tmp_path / "parts", scale=0.3).run(pool, on_step=interrupt_after(2))
    resumed = algorithm_in(tmp_path / "parts", scale=0.3, resume=True).run(pool)

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
