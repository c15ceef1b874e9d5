"""The published computation, step by step: the vectors decide whether the mathematics is right."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fusion_bench_nufilt import fuse_layers
from fusion_bench_nufilt.nufilt import FusionConfig
from fusion_bench_nufilt.nufilt.adapter import Objective, fit_adapter
from fusion_bench_nufilt.nufilt.subspace import null_space_filter, top_right_singular_vectors
from tests.conftest import every_device, shared_or_skip

HERE = Path(__file__).parent / "parity"
#: Those in the repository.
SMALL = [case["name"] for case in json.loads((HERE / "cases.json").read_text())]
#: Those beside a developer's checkout.
LARGE = [
    "tall_f64",
    "square_f64",
    "wide_f64",
    "adapter_only_f64",
    "filter_only_f64",
    "release_first_task_f64",
    "attention_768_f32",
    "mlp_1536x384_f32",
]
CASES = [*SMALL, *LARGE]
TOLERANCE = {"float64": 1e-9, "float32": 1e-3}


def load_case(name):
    folder = HERE
    if name not in SMALL:
        folder = shared_or_skip("parity")
    cases = {case["name"]: case for case in json.loads((folder / "cases.json").read_text())}
    return cases[name], load_file(folder / f"{name}.safetensors")


def config_of(case):
    keys = ("null_rank", "lora_rank", "task_rank", "lr", "max_steps", "null_space")
    first_task = {"paper": "paper", "reference": "release"}[case["first_task"]]
    return FusionConfig(**{key: case[key] for key in keys}, first_task=first_task)


@every_device
@pytest.mark.parametrize("name", CASES)
def test_the_whole_stream_agrees(name, device):
    case, vectors = load_case(name)
    tolerance = TOLERANCE[case["dtype"]]
    config = config_of(case)
    pretrained = {"layer": vectors["pretrained"]}
    merged = {"layer": vectors["pretrained"]}
    for t in range(case["tasks"]):
        task = {"layer": vectors[f"task.{t}"]}
        lora_A = {"layer": vectors[f"lora_A_init.{t}"]}
        merged, reports = fuse_layers(
            pretrained, merged, task, config, step=t + 1, lora_A=lora_A, device=device
        )
        tau_norm = (task["layer"] - pretrained["layer"]).norm()
        error = (merged["layer"] - vectors[f"merged.{t}"]).norm() / tau_norm
        assert error <= tolerance, f"step {t}: {error:.2e}"
        losses = vectors.get(f"loss.{t}")
        if losses is not None:
            report = reports["layer"]
            assert report.loss_before == pytest.approx(losses[0].item(), rel=tolerance)
            assert report.loss_after == pytest.approx(losses[-1].item(), rel=tolerance)
            assert report.loss_after < report.loss_before


@pytest.mark.parametrize("name", [name for name in CASES if name != "filter_only_f64"])
def test_every_loss_on_the_way_agrees(name):
    case, vectors = load_case(name)
    for t in range(1, case["tasks"]):
        tau = (vectors[f"task.{t}"] - vectors["pretrained"])[None]
        tau_merged = (vectors[f"merged.{t - 1}"] - vectors["pretrained"])[None]
        V_p = top_right_singular_vectors(tau_merged, case["null_rank"])
        V_t = top_right_singular_vectors(tau, case["task_rank"])
        tau_filtered = tau
        if case["null_space"]:
            tau_filtered = null_space_filter(tau, V_p)
        objective = Objective.build(tau, tau_filtered, tau_merged, V_t, V_p)
        lora_A = vectors[f"lora_A_init.{t}"][None]
        _, _, losses = fit_adapter(objective, lora_A, lr=case["lr"], max_steps=case["max_steps"])
        expected = vectors[f"loss.{t}"]
        tolerance = TOLERANCE[case["dtype"]]
        torch.testing.assert_close(losses[0], expected, rtol=tolerance, atol=0, check_dtype=False)
