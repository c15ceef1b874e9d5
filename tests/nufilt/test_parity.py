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
SMALL = [
    case["name"] for case in json.loads((HERE / "cases.json").read_text())
]  # in the repository
LARGE = [
    "tall_f64",
    "square_f64",
    "wide_f64",
    "adapter_only_f64",
    "filter_only_f64",
    "release_first_task_f64",
]
LARGE += ["attention_768_f32", "mlp_1536x384_f32"]  # beside a developer's checkout
CASES = [*SMALL, *LARGE]
TOLERANCE = {"float64": 1e-9, "float32": 1e-3}


def load_case(name):
    folder = HERE if name in SMALL else shared_or_skip("parity")
    (case,) = [
        case for case in json.loads((folder / "cases.json").read_text()) if case["name"] == name
    ]
    return case, load_file(folder / f"{name}.safetensors")


def config_of(case):
    keys = ("null_rank", "lora_rank", "task_rank", "lr", "max_steps", "null_space")
    first_task = {"paper": "paper", "reference": "release"}[case["first_task"]]
    return FusionConfig(**{key: case[key] for key in keys}, first_task=first_task)


@every_device
@pytest.mark.parametrize("name", CASES)
def test_the_whole_stream_agrees(name, device):
    case, vectors = load_case(name)
    pretrained, merged = {"layer": vectors["pretrained"]}, {"layer": vectors["pretrained"]}
    for t in range(case["tasks"]):
        task = {"layer": vectors[f"task.{t}"]}
        lora_A = {"layer": vectors[f"lora_A_init.{t}"]}
        config, models = config_of(case), (pretrained, merged, task)
        merged, reports = fuse_layers(*models, config, step=t + 1, lora_A=lora_A, device=device)
        tau_norm = (task["layer"] - pretrained["layer"]).norm()
        error = (merged["layer"] - vectors[f"merged.{t}"]).norm() / tau_norm
        assert error <= TOLERANCE[case["dtype"]], f"step {t}: {error:.2e}"
        if (expected := vectors.get(f"loss.{t}")) is not None:
            report = reports["layer"]
            assert report.loss_before == pytest.approx(
                expected[0].item(), rel=TOLERANCE[case["dtype"]]
            )
            assert report.loss_after == pytest.approx(
                expected[-1].item(), rel=TOLERANCE[case["dtype"]]
            )
            assert report.loss_after < report.loss_before


@pytest.mark.parametrize("name", [name for name in CASES if name != "filter_only_f64"])
def test_every_loss_on_the_way_agrees(name):
    case, vectors = load_case(name)
    for t in range(1, case["tasks"]):
        tau = (vectors[f"task.{t}"] - vectors["pretrained"])[None]
        tau_merged = (vectors[f"merged.{t - 1}"] - vectors["pretrained"])[None]
        V_p = top_right_singular_vectors(tau_merged, case["null_rank"])
        V_t = top_right_singular_vectors(tau, case["task_rank"])
        tau_filtered = null_space_filter(tau, V_p) if case["null_space"] else tau
        objective = Objective.build(tau, tau_filtered, tau_merged, V_t, V_p)
        *_, losses = fit_adapter(
            objective, vectors[f"lora_A_init.{t}"][None], lr=case["lr"], max_steps=case["max_steps"]
        )
        torch.testing.assert_close(
            losses[0],
            vectors[f"loss.{t}"],
            rtol=TOLERANCE[case["dtype"]],
            atol=0,
            check_dtype=False,
        )
