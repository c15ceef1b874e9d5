"""What a plan says of its time: never how long it is, but what it depends on."""

from dataclasses import replace

import pytest

from fusion_bench_nufilt import FusionConfig
from fusion_bench_nufilt.core.spectral import SpectralConfig
from fusion_bench_nufilt.folders import Settings, forecast, plan_merge
from fusion_bench_nufilt.folders.forecast import layer_flops
from fusion_bench_nufilt.folders.methods import Nufilt, Spectral
from tests.folders.helpers import RANKS, configs, save_stream
from tests.models import llama

CONFIG = FusionConfig()


@pytest.mark.parametrize("shape", [(768, 768), (3072, 768), (768, 3072), (4096, 4096), (11008, 4096)])
def test_what_costs_less_is_counted_as_less(shape):
    cost = layer_flops(shape, None, CONFIG)
    assert layer_flops(shape, 16, CONFIG) < cost
    assert layer_flops(shape, None, replace(CONFIG, max_steps=25)) < cost
    assert layer_flops(shape, None, replace(CONFIG, solver="closed_form")) < cost
    assert layer_flops((shape[0] // 2, shape[1] // 2), None, CONFIG) < cost / 3


def test_layers_that_are_solved_are_counted_and_bytes_that_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(forecast, "_rates", lambda method, workers: (0.0, 1.0))
    save_stream(tmp_path, llama(), tasks=2)

    def plan(tasks, merged=None):
        folders = [str(tmp_path / task) for task in tasks]
        return plan_merge(str(tmp_path / "base"), folders, merged, *configs(RANKS), Settings(step=1))

    assert plan(["task1", "task2"]).predict_seconds() == 4 * plan(["task1"]).base.nbytes  # three read, one written
    monkeypatch.setattr(forecast, "_rates", lambda method, workers: (1.0, 0.0))
    assert plan(["task1"]).predict_seconds() == 0  # the first task is taken as it is
    once = plan(["task1", "task2"]).predict_seconds()
    assert once > 0
    assert plan(["task1", "task2"], str(tmp_path / "task1")).predict_seconds() == 2 * once


@pytest.mark.parametrize("method", [Nufilt(replace(CONFIG, max_steps=2), seed=0), Spectral(SpectralConfig(), [], {})])
def test_a_sample_is_worked_off(method):
    assert all(rate > 0 for rate in forecast._rates(method, workers=1))
